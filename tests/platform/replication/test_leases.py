"""Test lease election, and that two mirrors send each email and webhook call once."""

import json
import math
from datetime import timedelta

import pytest
from django.core import mail
from django.utils import timezone
from helpers.event_log_builder import LogBuilder
from helpers.fake_mirror import FakeMirror
from helpers.mirror_lists import list_entry, signed_list
from helpers.rebuild_site import all_events, all_private_data, rebuild_in_random_order
from hypothesis import given
from hypothesis import strategies as st

from coordinator.eventlog import ingest
from coordinator.eventlog.models import LogEvent
from coordinator.eventlog.projection import current_state
from coordinator.lib import site_identity
from coordinator.notify import tasks
from coordinator.notify.models import Delivery, Notification, NotificationPreference, Webhook
from coordinator.notify.notification_types import NotificationDraft, NotificationType
from coordinator.replication import leases, mirror_list
from coordinator.replication.lease_election import (
    CANDIDATE_TIMEOUT,
    ISOLATION_WAIT,
    PEER_TIMEOUT,
    LeaseDecision,
    LeaseState,
    decide,
    rank_candidates,
)
from coordinator.replication.models import PeerStatus

KEYS = [f"{n:064x}" for n in range(6)]
MIRRORS = st.sets(st.sampled_from(KEYS), min_size=1)
DUTIES = st.text("abcdef", min_size=1, max_size=8)


def asked(
    duty: str,
    me: str,
    there: set[str],
    *,
    dead: dict[str, float] | None = None,
    age: float = 0.0,
    **taken,
):
    """`dead`: of those, seconds since they were last heard."""
    return decide(
        duty,
        LeaseState(**taken),
        me,
        {key: (dead or {}).get(key, 1.0) for key in there - {me}},
        age,
    )


# ---- purely


@given(DUTIES, MIRRORS)
def test_of_mirrors_that_see_each_other_one_takes_a_fresh_duty(duty, there):
    takes = [me for me in there if asked(duty, me, there) is LeaseDecision.ACQUIRE]
    assert takes == [rank_candidates(duty, there)[0]]


@given(DUTIES, MIRRORS, st.data())
def test_removing_another_candidate_does_not_change_the_lease_holder(duty, there, data):
    other = data.draw(st.sampled_from(sorted(there)))
    assert [key for key in rank_candidates(duty, there) if key != other] == rank_candidates(
        duty, there - {other}
    )


@given(DUTIES, st.sets(st.sampled_from(KEYS), min_size=3), st.booleans(), st.floats(0, 5000))
def test_when_the_chosen_one_dies_one_other_takes_over(duty, there, had_taken, since):
    first, second, *others = rank_candidates(duty, there)
    taken = {"epoch": 1, "holder": first} if had_taken else {}
    for me in (second, *others):
        assert (
            asked(duty, me, there, dead={first: PEER_TIMEOUT - 1}, age=1, **taken)
            is LeaseDecision.WAIT
        ), "it may live yet"
    dead = {first: PEER_TIMEOUT + 0.1}
    assert asked(duty, second, there, dead=dead, age=since + 1, **taken) is LeaseDecision.ACQUIRE
    for me in others:
        assert asked(duty, me, there, dead=dead, age=since + 1, **taken) is LeaseDecision.WAIT, (
            "one of them, not all at once"
        )


@given(DUTIES, MIRRORS, st.floats(0, 1e6), st.sampled_from(KEYS), st.integers(1, 9))
def test_done_lease_and_lease_of_a_live_holder_are_not_acquired(duty, there, age, by, epoch):
    for me in there:
        assert (
            asked(duty, me, there, age=age, epoch=epoch, holder=by, done=True) is LeaseDecision.DONE
        )
        found = asked(duty, me, there, age=age, epoch=epoch, holder=by)
        assert (
            found is LeaseDecision.HELD
            if me == by
            else found is LeaseDecision.WAIT or by not in there
        )


@given(DUTIES, MIRRORS)
def test_one_that_does_not_do_its_duty_makes_room_for_the_next(duty, there):
    for place, me in enumerate(rank_candidates(duty, there)):
        assert asked(duty, me, there, age=place * CANDIDATE_TIMEOUT) is LeaseDecision.ACQUIRE
        assert (
            place == 0
            or asked(duty, me, there, age=place * CANDIDATE_TIMEOUT - 1) is LeaseDecision.WAIT
        )


@given(DUTIES, st.sets(st.sampled_from(KEYS), min_size=2))
def test_isolated_mirror_waits_before_it_acquires_a_lease(duty, there):
    me = min(there)
    dead = dict.fromkeys(there, PEER_TIMEOUT + ISOLATION_WAIT - 1)
    assert asked(duty, me, there, dead=dead, age=1e6) is LeaseDecision.WAIT
    dead = dict.fromkeys(there, PEER_TIMEOUT + ISOLATION_WAIT)
    assert asked(duty, me, there, dead=dead, age=1e6) is LeaseDecision.ACQUIRE
    never = dict.fromkeys(there, math.inf)
    assert asked(duty, me, there, dead=never, age=ISOLATION_WAIT - 1) is LeaseDecision.WAIT
    assert asked(duty, me, there, dead=never, age=ISOLATION_WAIT) is LeaseDecision.ACQUIRE


# ---- with rows


@pytest.fixture
def other():
    """Yield a second mirror of the list, which was seen just now."""
    mirror = FakeMirror(LogBuilder())
    ours = list_entry(site_identity.identity(), "https://here.example.org")
    first = signed_list(1, ours, mirror.list_entry)
    mirror_list.ingest_lists([first], vouched=first.digest)
    heard(mirror, 0)
    yield mirror
    mirror.close()


def heard(other: FakeMirror, seconds_ago: float) -> None:
    at = timezone.now() - timedelta(seconds=seconds_ago)
    PeerStatus.objects.update_or_create(pk=other.list_entry.key, defaults={"last_seen": at})


def notice(person, other: FakeMirror, whose: str) -> Notification:
    """One whose letter is first `whose`: "ours" or "theirs"."""
    keys = {"ours": site_identity.identity().key, "theirs": other.list_entry.key}
    for n in range(100):
        duty = leases.lease_name("email", person.pk, f"key {n}")
        if rank_candidates(duty, keys.values())[0] == keys[whose]:
            made = Notification.create_once(
                NotificationDraft(person, NotificationType.RUN_STARTED, f"key {n}", "It started")
            )
            assert made and made.lease_name == duty
            return made
    raise AssertionError("a hundred in a row")


def due() -> None:
    Notification.objects.filter(email_due__isnull=False).update(email_due=timezone.now())
    Delivery.objects.filter(due__isnull=False).update(due=timezone.now())


@pytest.mark.django_db
@pytest.mark.usefixtures("valkey")
def test_a_letter_goes_out_once_from_the_mirror_whose_turn_it_is(person, other):
    ada = person()
    mine, theirs = notice(ada, other, "ours"), notice(ada, other, "theirs")
    assert tasks.send_emails() == 1 and len(mail.outbox) == 1
    assert current_state(f"lease:{mine.lease_name}") == {
        "epoch": 1,
        "holder": site_identity.identity().key,
        "done": True,
    }
    for row in Notification.objects.filter(pk=theirs.pk):
        assert row.email_due and row.email_tries == 0 and row.emailed is None
    other.log.append("lease.done", theirs.lease_name, {"mirror": other.list_entry.key})
    ingest.ingest_events(other.log.events)
    due()
    assert tasks.send_emails() == 0 and len(mail.outbox) == 1
    assert not Notification.objects.filter(email_due__isnull=False).exists()


@pytest.mark.django_db
@pytest.mark.usefixtures("valkey")
def test_email_is_sent_by_another_mirror_after_the_holder_dies(person, other):
    theirs = notice(person(), other, "theirs")
    other.log.append(
        "lease.acquire", theirs.lease_name, {"mirror": other.list_entry.key, "epoch": 1}
    )
    ingest.ingest_events(other.log.events)
    assert tasks.send_emails() == 0
    heard(other, PEER_TIMEOUT + ISOLATION_WAIT + 1)
    due()
    assert tasks.send_emails() == 0, "it was owed a moment ago: a mirror that is alone waits"
    Notification.objects.update(created=timezone.now() - timedelta(seconds=ISOLATION_WAIT + 1))
    due()
    assert tasks.send_emails() == 1
    state = current_state(f"lease:{theirs.lease_name}")
    assert state == {"epoch": 2, "holder": site_identity.identity().key, "done": True}
    returned = LeaseState(**state)
    assert (
        decide(
            theirs.lease_name,
            returned,
            other.list_entry.key,
            {site_identity.identity().key: 0.0},
            1e6,
        )
        is LeaseDecision.DONE
    )
    (letter,) = mail.outbox
    first, _ = letter.extra_headers["Message-ID"][1:].split("@")
    assert first == leases.lease_name(theirs.lease_name)[:32], (
        "and had it sent it too, a mail program would know them as one"
    )


@pytest.mark.django_db
@pytest.mark.usefixtures("valkey")
def test_a_mirror_whose_epoch_was_passed_does_not_try_its_letter_again(person, other, settings):
    mine = notice(person(), other, "ours")
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT, settings.EMAIL_TIMEOUT = "127.0.0.1", 1, 1
    assert tasks.send_emails() == 0 and current_state(f"lease:{mine.lease_name}")["epoch"] == 1
    other.log.append("lease.acquire", mine.lease_name, {"mirror": other.list_entry.key, "epoch": 2})
    ingest.ingest_events(other.log.events)
    settings.EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
    due()
    assert tasks.send_emails() == 0 and mail.outbox == []


@pytest.mark.django_db
@pytest.mark.usefixtures("valkey")
def test_single_site_records_no_lease(person):
    Notification.create_once(
        NotificationDraft(person(), NotificationType.RUN_STARTED, "one", "It started")
    )
    assert tasks.send_emails() == 1
    assert not LogEvent.objects.filter(type__startswith="lease.").exists()


@pytest.mark.django_db
@pytest.mark.usefixtures("valkey")
def test_webhooks_and_preferences_are_rebuilt(person):
    ada = person()
    hook = Webhook.objects.create(
        person=ada, url="https://example.org/x", secret="whsec_" + "A" * 43 + "=", kinds=[]
    )
    hook.set_types([NotificationType.RUN_STARTED])
    gone = Webhook.objects.create(
        person=ada, url="https://example.org/y", secret="whsec_" + "B" * 43 + "=", kinds=[]
    )
    gone.set_types([NotificationType.RUN_STARTED])
    gone.remove()
    NotificationPreference.set_wanted(ada, NotificationType.RUN_STALLED, email=False)
    said = "".join(LogEvent.objects.values_list("body", flat=True))
    assert "example.org/x" not in said and "whsec_" not in said
    events, kept = all_events(), all_private_data()
    assert not any("example.org/y" in each.body for each in kept)
    Webhook.objects.all().delete()
    NotificationPreference.objects.all().delete()
    rebuild_in_random_order(events, kept)
    (there,) = Webhook.objects.all()
    assert (there.pk, there.url, there.secret, there.kinds) == (
        hook.pk,
        hook.url,
        hook.secret,
        ["run.started"],
    )
    (choice,) = NotificationPreference.objects.all()
    assert (choice.kind, choice.site, choice.email) == (NotificationType.RUN_STALLED, True, False)
    hook.refresh_from_db()
    hook.set_active(False)
    one = Notification.create_once(
        NotificationDraft(ada, NotificationType.RUN_STARTED, "one", "It started")
    )
    assert (
        hook.create_delivery(one, {}).message_id
        == f"msg_{leases.lease_name('call', hook.pk, 'one')[:32]}"
    )
    assert json.dumps(Delivery.objects.get().body)
