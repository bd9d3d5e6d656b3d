"""Test that a restored site is read-only until it has its last events, and pseudonyms."""

import time

import pytest
from django.core.management import call_command
from helpers.mirrors.event_log_builder import LogBuilder
from helpers.mirrors.fake_mirror import FakeMirror
from helpers.mirrors.rebuild_site import all_events, all_private_data
from helpers.site.pages import open_client

from barnraise.protocol.coordinator_messages import JoinReply
from barnraise.protocol.messages import Ticket
from barnraise.protocol.signing import Identity, digest, open_signed
from coordinator.accounts.models import User
from coordinator.credit import tasks
from coordinator.eventlog import ingest, private_data, writer
from coordinator.eventlog.event import open_event
from coordinator.eventlog.models import Aggregate, LogEvent, LogState, Origin
from coordinator.eventlog.projection import current_state, state_hash
from coordinator.lib import site_identity
from coordinator.replication import mirror_list, pull, volunteer_salt
from coordinator.replication.protocol import LogHead, LogPart

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]


@pytest.fixture
def other():
    """Yield another mirror, which also has what this site wrote."""
    mirror = FakeMirror(LogBuilder())
    mirror.publish_list()
    yield mirror
    mirror.close()


def serve_own_log(other: FakeMirror, events: list) -> None:
    """Let the other mirror serve these events of this site's log."""
    origin = open_event(events[0]).origin
    last = events[-1]
    heads = other.heads

    def log_heads(who: str):
        other_heads = heads(who)
        ours = LogHead(seq=len(events), digest=digest(last.body))
        return other_heads.model_copy(update={"heads": {**other_heads.heads, origin: ours}})

    other.routes["GET /mirrors/heads"] = lambda query, who: other.identity.sign(
        "heads", log_heads(who)
    )
    other.routes[f"GET /mirrors/logs/{origin}"] = lambda query, who: LogPart(
        events=events[int(query["after"]) :][:100]
    )


@pytest.fixture
def restored(other, person):
    """Restore a backup from before Ada's ban, which another mirror has; return her and the log."""
    ada, root = person(), person("root@example.org", is_staff=True)
    backup = LogEvent.objects.count()
    person_state = Aggregate.objects.get(pk=f"person:{ada.pk}").state
    total = state_hash()
    ada.ban(root, "spam")
    own_events = [event for event in all_events() if event.key == site_identity.identity().key]
    serve_own_log(other, own_events)
    lost = LogEvent.objects.order_by("seq")[backup:]
    assert [event.type for event in lost] == ["person.ban"]
    last = LogEvent.objects.order_by("seq")[backup - 1]
    LogEvent.objects.filter(seq__gt=last.seq).delete()
    Origin.objects.update(ours=False, head_seq=last.seq, head_digest=last.digest, head_hlc=last.hlc)
    Aggregate.objects.filter(pk=f"person:{ada.pk}").update(state=person_state)
    LogState.objects.update(state_sum=total, restore_pending=True)
    User.objects.filter(pk=ada.pk).update(is_active=True, banned=None)
    return ada, own_events


def test_restored_site_is_read_only_until_its_log_is_pulled_back(restored, other):
    ada, _ = restored
    client = open_client(ada)
    assert writer.is_restore_pending() and client.get("/runs/").status_code == 200
    before = LogEvent.objects.count()
    answer = client.post("/account/", {"name": "Ada again"})
    assert answer.status_code == 503 and b"restored from a backup" in answer.content
    answer = client.post("/api/v1/runs", "{}", content_type="application/json")
    assert answer.status_code == 503 and "restored from a backup" in answer.json()["error"]
    with pytest.raises(writer.RestorePendingError):
        ada.rename("Ada again")
    assert tasks.record_events.apply().get() in (0, None)
    assert LogEvent.objects.count() == before

    result = pull.pull_from(mirror_list.other_mirrors()[0])
    assert not writer.is_restore_pending() and not result.refused
    assert User.objects.get(pk=ada.pk).banned, "the ban was not restored first"
    new_log = Origin.objects.get(ours=True)
    assert (
        current_state(f"origin:{new_log.pk}")["after"]
        == Origin.objects.get(key=new_log.key, ours=False).pk
    )
    assert User.objects.get(email="root@example.org").rename("Root")
    assert new_log.events.count() >= 2


def test_restored_site_keeps_waiting_if_its_log_does_not_come_back_whole(restored, other):
    _, own_events = restored
    serve_own_log(
        other, [*own_events[:-1], own_events[-1].model_copy(update={"signature": "0" * 128})]
    )
    result = pull.pull_from(mirror_list.other_mirrors()[0])
    assert result.refused and writer.is_restore_pending()
    other.close()
    assert "does not answer" in pull.pull_from(mirror_list.other_mirrors()[0]).refused[0]
    assert writer.is_restore_pending()


def test_operator_resumes_a_restored_site_without_other_mirrors(restored, other, capsys):
    ada, own_events = restored
    call_command("eventlog", "resume")
    assert "started a new log" in capsys.readouterr().out and not writer.is_restore_pending()
    assert ada.rename("Ada again")
    ingest.ingest_events(own_events)  # the old log arrives later
    assert User.objects.get(pk=ada.pk).banned
    call_command("eventlog", "resume")
    assert "does not wait" in capsys.readouterr().out


def test_restored_site_without_a_mirror_list_does_not_wait(person):
    person()
    Origin.objects.update(ours=False)
    assert not writer.is_restore_pending() and person("bob@example.org").rename("Bob")


# ---- pseudonyms


def read_pseudonym(reply: JoinReply) -> str:
    """Return the volunteer's pseudonym in the ticket of a reply."""
    return open_signed(reply.ticket, "ticket", Ticket).volunteer


def test_all_mirrors_sign_one_opaque_pseudonym_for_a_person(
    other, person, volunteer, launched_run, settings
):
    ada = person()
    run, first = launched_run(ada)
    second = volunteer(ada, 2)
    bobs_machine = volunteer(person("bob@example.org"), 3)
    pseudonym = read_pseudonym(first.join(run))
    assert read_pseudonym(second.join(run)) == pseudonym != read_pseudonym(bobs_machine.join(run))
    own = volunteer_salt.volunteer_pseudonym(ada.pk)
    assert own == pseudonym
    private_records = all_private_data()
    state = current_state("salt:volunteers")
    body = next(
        record.body for record in private_records if record.digest == state["content_digest"]
    )
    assert site_identity.volunteer_salt().hex() in body
    bodies = "".join(LogEvent.objects.values_list("body", flat=True))
    assert site_identity.volunteer_salt().hex() not in bodies, "the salt is in an event"


def test_later_site_uses_the_first_salt_once_it_has_arrived(other, person):
    ada = person()
    before = volunteer_salt.volunteer_pseudonym(ada.pk)
    older_log = LogBuilder(78)
    salt_record = private_data.PrivateRecord("", "a" * 32, '{"salt":"' + "5" * 64 + '"}')
    content_digest = digest(salt_record.salt + salt_record.body)
    early = time.time() - 1000
    older_log.events = []
    older_log.hlc = 0
    older_log.append("origin.begin", older_log.origin, {"name": "elder", "after": None}, at=early)
    older_log.append("salt.create", "volunteers", {"content_digest": content_digest}, at=early)
    assert not ingest.ingest_events(older_log.events).rejected
    assert volunteer_salt.volunteer_pseudonym(ada.pk) == before, (
        "the salt was used before it arrived"
    )
    private_data.ingest(
        [private_data.PrivateRecord(content_digest, salt_record.salt, salt_record.body)]
    )
    after = volunteer_salt.volunteer_pseudonym(ada.pk)
    assert after != before and after == volunteer_salt.volunteer_pseudonym(str(ada.pk))
    assert Identity(b"q" * 32).key not in after
