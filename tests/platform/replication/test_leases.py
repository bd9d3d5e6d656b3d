"""Test lease election, and that two mirrors send each email and webhook call once."""

import json
import math
from datetime import timedelta

import pytest
from django.core import mail
from django.utils import timezone
from helpers.mirrors.event_log_builder import LogBuilder
from helpers.mirrors.fake_mirror import FakeMirror
from helpers.mirrors.rebuild_site import all_events, all_private_data, rebuild_in_random_order
from helpers.site.notices import notify
from hypothesis import given
from hypothesis import strategies as st

from coordinator.eventlog import ingest
from coordinator.eventlog.models import LogEvent
from coordinator.eventlog.projection import current_state
from coordinator.lib import site_identity
from coordinator.notify import tasks
from coordinator.notify.models import Delivery, Notification, NotificationPreference, Webhook
from coordinator.notify.notification_types import NotificationType
from coordinator.replication import leases
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


def decide_lease(
    duty: str,
    me: str,
    mirrors: set[str],
    *,
    dead: dict[str, float] | None = None,
    age: float = 0.0,
    **lease_fields,
):
    """Return what mirror `me` decides about a lease.

    Args:
        duty: What the lease is for.
        me: The mirror that decides.
        mirrors: All mirrors of the list.
        dead: Dead mirror → seconds since it was last seen; 1 second for the others.
        age: Seconds since the duty arose.
        lease_fields: The state of the lease.
    """
    return decide(
        duty,
        LeaseState(**lease_fields),
        me,
        {key: (dead or {}).get(key, 1.0) for key in mirrors - {me}},
        age,
    )


# ---- the decision


@given(DUTIES, MIRRORS)
def test_one_of_several_live_mirrors_acquires_a_new_lease(duty, mirrors):
    acquirers = [me for me in mirrors if decide_lease(duty, me, mirrors) is LeaseDecision.ACQUIRE]
    assert acquirers == [rank_candidates(duty, mirrors)[0]]


@given(DUTIES, MIRRORS, st.data())
def test_removing_another_candidate_does_not_change_the_lease_holder(duty, mirrors, data):
    other = data.draw(st.sampled_from(sorted(mirrors)))
    assert [key for key in rank_candidates(duty, mirrors) if key != other] == rank_candidates(
        duty, mirrors - {other}
    )


@given(DUTIES, st.sets(st.sampled_from(KEYS), min_size=3), st.booleans(), st.floats(0, 5000))
def test_second_candidate_acquires_the_lease_after_the_first_dies(
    duty, mirrors, was_acquired, elapsed_seconds
):
    first, second, *others = rank_candidates(duty, mirrors)
    lease_fields = {"epoch": 1, "holder": first} if was_acquired else {}
    for me in (second, *others):
        assert (
            decide_lease(duty, me, mirrors, dead={first: PEER_TIMEOUT - 1}, age=1, **lease_fields)
            is LeaseDecision.WAIT
        ), "the first candidate counts as dead too early"
    dead = {first: PEER_TIMEOUT + 0.1}
    assert (
        decide_lease(duty, second, mirrors, dead=dead, age=elapsed_seconds + 1, **lease_fields)
        is LeaseDecision.ACQUIRE
    )
    for me in others:
        assert (
            decide_lease(duty, me, mirrors, dead=dead, age=elapsed_seconds + 1, **lease_fields)
            is LeaseDecision.WAIT
        ), "several candidates acquired the lease"


@given(DUTIES, MIRRORS, st.floats(0, 1e6), st.sampled_from(KEYS), st.integers(1, 9))
def test_done_lease_and_lease_of_a_live_holder_are_not_acquired(duty, mirrors, age, holder, epoch):
    for me in mirrors:
        assert (
            decide_lease(duty, me, mirrors, age=age, epoch=epoch, holder=holder, done=True)
            is LeaseDecision.DONE
        )
        decision = decide_lease(duty, me, mirrors, age=age, epoch=epoch, holder=holder)
        assert (
            decision is LeaseDecision.HELD
            if me == holder
            else decision is LeaseDecision.WAIT or holder not in mirrors
        )


@given(DUTIES, MIRRORS)
def test_next_candidate_acquires_a_lease_left_undone(duty, mirrors):
    for rank, me in enumerate(rank_candidates(duty, mirrors)):
        assert (
            decide_lease(duty, me, mirrors, age=rank * CANDIDATE_TIMEOUT) is LeaseDecision.ACQUIRE
        )
        assert (
            rank == 0
            or decide_lease(duty, me, mirrors, age=rank * CANDIDATE_TIMEOUT - 1)
            is LeaseDecision.WAIT
        )


@given(DUTIES, st.sets(st.sampled_from(KEYS), min_size=2))
def test_isolated_mirror_waits_before_it_acquires_a_lease(duty, mirrors):
    me = min(mirrors)
    dead = dict.fromkeys(mirrors, PEER_TIMEOUT + ISOLATION_WAIT - 1)
    assert decide_lease(duty, me, mirrors, dead=dead, age=1e6) is LeaseDecision.WAIT
    dead = dict.fromkeys(mirrors, PEER_TIMEOUT + ISOLATION_WAIT)
    assert decide_lease(duty, me, mirrors, dead=dead, age=1e6) is LeaseDecision.ACQUIRE
    never = dict.fromkeys(mirrors, math.inf)
    assert decide_lease(duty, me, mirrors, dead=never, age=ISOLATION_WAIT - 1) is LeaseDecision.WAIT
    assert decide_lease(duty, me, mirrors, dead=never, age=ISOLATION_WAIT) is LeaseDecision.ACQUIRE


# ---- emails and webhooks


@pytest.fixture
def other():
    """Yield a second mirror of the list, which was seen just now."""
    mirror = FakeMirror(LogBuilder())
    mirror.publish_list()
    set_last_seen(mirror, 0)
    yield mirror
    mirror.close()


def set_last_seen(other: FakeMirror, seconds_ago: float) -> None:
    """Set when the other mirror was last seen."""
    at = timezone.now() - timedelta(seconds=seconds_ago)
    PeerStatus.objects.update_or_create(pk=other.list_entry.key, defaults={"last_seen": at})


def create_notification(person, other: FakeMirror, first_candidate: str) -> Notification:
    """Create a notification whose email this site ("ours") or the other ("theirs") sends first."""
    keys = {"ours": site_identity.identity().key, "theirs": other.list_entry.key}
    for n in range(100):
        duty = leases.lease_name("email", person.pk, f"key {n}")
        if rank_candidates(duty, keys.values())[0] == keys[first_candidate]:
            notification = notify(person, key=f"key {n}")
            assert notification and notification.lease_name == duty
            return notification
    raise AssertionError("no key among a hundred has that first candidate")


def make_due() -> None:
    """Make all unsent emails and webhook calls due now."""
    Notification.objects.filter(email_due__isnull=False).update(email_due=timezone.now())
    Delivery.objects.filter(due__isnull=False).update(due=timezone.now())


@pytest.mark.django_db
@pytest.mark.usefixtures("valkey")
def test_email_is_sent_once_by_its_lease_holder(person, other):
    ada = person()
    own, theirs = create_notification(ada, other, "ours"), create_notification(ada, other, "theirs")
    assert tasks.send_emails() == 1 and len(mail.outbox) == 1
    assert current_state(f"lease:{own.lease_name}") == {
        "epoch": 1,
        "holder": site_identity.identity().key,
        "done": True,
    }
    for notification in Notification.objects.filter(pk=theirs.pk):
        assert notification.email_due
        assert notification.email_tries == 0
        assert notification.emailed is None
    other.log.append("lease.done", theirs.lease_name, {"mirror": other.list_entry.key})
    ingest.ingest_events(other.log.events)
    make_due()
    assert tasks.send_emails() == 0 and len(mail.outbox) == 1
    assert not Notification.objects.filter(email_due__isnull=False).exists()


@pytest.mark.django_db
@pytest.mark.usefixtures("valkey")
def test_email_is_sent_by_another_mirror_after_the_holder_dies(person, other):
    theirs = create_notification(person(), other, "theirs")
    other.log.append(
        "lease.acquire", theirs.lease_name, {"mirror": other.list_entry.key, "epoch": 1}
    )
    ingest.ingest_events(other.log.events)
    assert tasks.send_emails() == 0
    set_last_seen(other, PEER_TIMEOUT + ISOLATION_WAIT + 1)
    make_due()
    assert tasks.send_emails() == 0, "an isolated mirror did not wait"
    Notification.objects.update(created=timezone.now() - timedelta(seconds=ISOLATION_WAIT + 1))
    make_due()
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
    (message,) = mail.outbox
    first, _ = message.extra_headers["Message-ID"][1:].split("@")
    assert first == leases.lease_name(theirs.lease_name)[:32], (
        "the mirrors' emails would have different ids"
    )


@pytest.mark.django_db
@pytest.mark.usefixtures("valkey")
def test_email_is_not_retried_after_another_mirror_took_the_lease(person, other, settings):
    notification = create_notification(person(), other, "ours")
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT, settings.EMAIL_TIMEOUT = "127.0.0.1", 1, 1
    assert tasks.send_emails() == 0
    assert current_state(f"lease:{notification.lease_name}")["epoch"] == 1
    other.log.append(
        "lease.acquire", notification.lease_name, {"mirror": other.list_entry.key, "epoch": 2}
    )
    ingest.ingest_events(other.log.events)
    settings.EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
    make_due()
    assert tasks.send_emails() == 0 and mail.outbox == []


@pytest.mark.django_db
@pytest.mark.usefixtures("valkey")
def test_single_site_records_no_lease(person):
    notify(person())
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
    removed_hook = Webhook.objects.create(
        person=ada, url="https://example.org/y", secret="whsec_" + "B" * 43 + "=", kinds=[]
    )
    removed_hook.set_types([NotificationType.RUN_STARTED])
    removed_hook.remove()
    NotificationPreference.set_wanted(ada, NotificationType.RUN_STALLED, email=False)
    event_bodies = "".join(LogEvent.objects.values_list("body", flat=True))
    assert "example.org/x" not in event_bodies and "whsec_" not in event_bodies
    events = all_events()
    private_records = all_private_data()
    assert not any("example.org/y" in record.body for record in private_records)
    Webhook.objects.all().delete()
    NotificationPreference.objects.all().delete()
    rebuild_in_random_order(events, private_records)
    (rebuilt,) = Webhook.objects.all()
    assert (rebuilt.pk, rebuilt.url, rebuilt.secret, rebuilt.kinds) == (
        hook.pk,
        hook.url,
        hook.secret,
        ["run.started"],
    )
    (choice,) = NotificationPreference.objects.all()
    assert (choice.kind, choice.site, choice.email) == (NotificationType.RUN_STALLED, True, False)
    hook.refresh_from_db()
    hook.set_active(False)
    notification = notify(ada)
    assert (
        hook.create_delivery(notification, {}).message_id
        == f"msg_{leases.lease_name('call', hook.pk, 'one')[:32]}"
    )
    assert json.dumps(Delivery.objects.get().body)
