"""Test recording and ingesting events: numbered, chained, signed, and whole or not at all."""

import threading
import time

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, models
from django.test import Client
from helpers.event_log_builder import LogBuilder, NotePayload, rejection

from barnraise.errors import MessageError
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import digest
from coordinator.eventlog import ingest, projection, registry, truncate, writer
from coordinator.eventlog.event import MAX_EVENT_CHARS, NO_DIGEST, open_event
from coordinator.eventlog.models import Aggregate, ForkProof, LogEvent, Origin
from coordinator.lib import site_identity

# ---- events of this site


def test_recorded_event_is_numbered_chained_signed_and_folded(db, note_rows):
    first = writer.record("note.write", "a", {"text": "one"})
    second = writer.record("note.write", "note:a", {"text": "two"})
    origin = Origin.objects.get()
    assert (origin.key, origin.ours, origin.head_seq) == (site_identity.identity().key, True, 3)
    first_event, *notes = writer.read_events(origin.pk, 0)
    assert (
        open_event(first_event).type == "origin.begin" and open_event(first_event).prev == NO_DIGEST
    )
    assert [open_event(signed).seq for signed in notes] == [2, 3]
    assert open_event(notes[1]).prev == digest(notes[0].body) == first.digest
    assert second.hlc > first.hlc
    assert projection.current_state("note:a") == {"text": "two"}
    assert writer.log_heads() == {origin.pk: (3, second.digest)}


def test_rolled_back_change_leaves_no_event_and_no_gap(db, note_rows):
    writer.record("note.write", "a", {"text": "one"})
    before = writer.log_heads(), projection.state_hash()
    with pytest.raises(ZeroDivisionError), writer.log_transaction():
        writer.record("note.write", "a", {"text": "two"})
        raise ZeroDivisionError
    assert (writer.log_heads(), projection.state_hash()) == before
    writer.record("note.write", "a", {"text": "three"})
    assert [seq for (seq,) in LogEvent.objects.values_list("seq")] == [1, 2, 3]


def test_record_with_an_invalid_payload_or_type_raises(db, note_rows):
    with pytest.raises(ValueError):
        writer.record("note.write", "a", {"text": "x" * 101})
    with pytest.raises(KeyError):
        writer.record("note.sing", "a", {"text": "la"})
    assert not LogEvent.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_concurrent_events_get_consecutive_numbers(note_rows):
    def record_notes(name: int) -> None:
        for n in range(10):
            writer.record("note.write", str(name), {"text": str(n)})
        connection.close()

    threads = [threading.Thread(target=record_notes, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = list(LogEvent.objects.order_by("seq"))
    assert Origin.objects.count() == 1
    assert [event.seq for event in events] == list(range(1, 42))
    assert [event.event.prev for event in events[1:]] == [event.digest for event in events[:-1]]
    assert [event.hlc for event in events] == sorted({event.hlc for event in events})
    assert projection.state_hash() == recompute_state_hash()


def recompute_state_hash() -> str:
    """Compute the state hash from all aggregates."""
    total = sum(
        projection.state_term(aggregate.name, aggregate.state)
        for aggregate in Aggregate.objects.all()
    )
    return f"{total % projection.MODULUS:064x}"


# ---- events of other mirrors


def test_other_log_is_stored_folded_and_served_unchanged(db, note_rows):
    other = LogBuilder()
    other.append("note.write", "a", {"text": "from afar"})
    result = ingest.ingest_events(other.events)
    assert (result.stored, result.rejected, result.forked) == (2, {}, [])
    assert note_rows == {"a": "from afar"}
    assert writer.read_events(other.origin, 0) == other.events
    assert writer.read_events(other.origin, 1) == other.events[1:]
    assert ingest.ingest_events(other.events).stored == 0  # a repetition changes nothing
    local_event = writer.record("note.write", "a", {"text": "here"})
    assert local_event.hlc > open_event(other.events[-1]).hlc
    assert projection.current_state("note:a") == {"text": "here"}


def test_state_hash_is_equal_after_the_same_events(db, note_rows):
    one, other = LogBuilder(1), LogBuilder(2)
    for n in range(5):
        one.append("note.write", f"{n % 2}", {"text": f"one {n}"})
        other.append("note.write", f"{n % 3}", {"text": f"other {n}"})
    ingest.ingest_events(one.events)
    ingest.ingest_events(other.events)
    first = projection.state_hash()
    assert first == recompute_state_hash() != NO_DIGEST
    rows = dict(note_rows)
    for model in (ForkProof, LogEvent, Origin, Aggregate, writer.LogState):
        model.objects.all().delete()
    note_rows.clear()
    for n in range(6):
        ingest.ingest_events([other.events[n]])
        ingest.ingest_events([one.events[n]])
    assert (projection.state_hash(), note_rows) == (first, rows)


def test_log_with_a_hole_is_refused_whole(db, note_rows):
    other = LogBuilder()
    for n in range(4):
        other.append("note.write", "a", {"text": str(n)})
    ingest.ingest_events(other.events[:2])
    reason = rejection(other.events[2], other.events[4])
    assert (
        reason
        == f"Log {other.origin[:8]} has a hole: event 5 came, and 3 is the last before it here."
    )
    assert "has a hole" in rejection(
        *LogBuilder(3).events[1:], LogBuilder(3).append("note.write", "a", {"text": "x"})
    )
    assert note_rows == {"a": "0"}


def test_event_that_does_not_continue_the_log_is_refused(db, note_rows):
    other = LogBuilder()
    ingest.ingest_events(other.events)
    wrong = other.sign("note.write", "a", {"text": "x"}, prev="1" * 64)
    assert "does not follow the event 1 that is here" in rejection(wrong)
    early = other.sign("note.write", "a", {"text": "x"}, hlc=1)
    assert "is stamped before the one it follows" in rejection(early)
    assert "does not begin as a log does" in rejection(
        LogBuilder(5).sign("note.write", "a", {"text": "x"}, seq=1)
    )


def test_altered_forged_or_foreign_event_is_refused(db, note_rows):
    other, thief = LogBuilder(), LogBuilder(8)
    other.append("note.write", "a", {"text": "true"})
    altered = other.events[1].model_copy(
        update={"body": other.events[1].body.replace("true", "lies")}
    )
    assert "its signature does not match" in rejection(other.events[0], altered)
    ingest.ingest_events(other.events)
    forged = thief.sign(
        "note.write",
        "a",
        {"text": "x"},
        origin=other.origin,
        seq=3,
        prev=digest(other.events[1].body),
    )
    assert f"is signed by {thief.identity.key[:8]}" in rejection(forged)
    assert "is no mirror of the list" in rejection(*thief.events, keys={other.identity.key})
    huge = other.identity.sign(
        "event",
        open_event(other.events[1]).model_copy(update={"payload": {"x": "y" * MAX_EVENT_CHARS}}),
    )
    assert "longer than 100,000 characters" in rejection(huge)
    with pytest.raises(MessageError, match="malformed"):
        open_event(sign_event_with_wrong_aggregate(other))


def sign_event_with_wrong_aggregate(other: LogBuilder) -> Signed:
    """Sign an event about an aggregate of another type than the event's."""
    return other.identity.sign(
        "event", open_event(other.events[1]).model_copy(update={"aggregate": "run:a"})
    )


def test_fault_in_one_log_does_not_affect_the_others(db, note_rows):
    good, bad = LogBuilder(1), LogBuilder(2)
    good.append("note.write", "a", {"text": "good"})
    bad.append("note.write", "b", {"text": "1"})
    bad.append("note.write", "b", {"text": "2"})
    result = ingest.ingest_events([*good.events, bad.events[0], bad.events[2]])
    assert (
        result.stored == 2 and list(result.rejected) == [bad.origin] and note_rows == {"a": "good"}
    )


def test_event_of_unknown_type_is_stored_and_projected_after_upgrade(db, note_rows):
    other = LogBuilder()
    other.append("song.sing", "a", {"text": "la"})
    other.append("note.write", "a", {"text": "one"})
    assert ingest.ingest_events(other.events).stored == 3
    before = projection.state_hash()
    assert LogEvent.objects.get(understood=False).type == "song.sing"
    assert writer.read_events(other.origin, 1) == other.events[1:]  # it is served to other mirrors
    stored_songs = {}
    registry.register(
        registry.AggregateType(
            "song",
            {"sing": NotePayload},
            lambda facts: {"text": facts[-1].payload.text},
            stored_songs.__setitem__,
        )
    )
    assert ingest.project_pending() == 1
    assert stored_songs == {"a": {"text": "la"}} and projection.state_hash() not in (
        before,
        NO_DIGEST,
    )
    assert not LogEvent.objects.filter(understood=False).exists() and ingest.project_pending() == 0


def list_stale_names() -> set[str]:
    """Return the names of aggregates whose newest events are not folded yet."""
    return set(Aggregate.objects.filter(stale=True).values_list("name", flat=True))


def test_events_stored_before_a_crash_are_folded_after_it(db, note_rows):
    other = LogBuilder()
    other.append("note.write", "a", {"text": "one"})
    other.append("song.sing", "b", {"text": "la"})
    ingest.ingest_events(other.events, defer=True)
    assert note_rows == {} and list_stale_names() == {"note:a", f"origin:{other.origin}"}
    assert ingest.project_pending() == 2 and note_rows == {"a": "one"} and not list_stale_names()
    other.append("note.write", "a", {"text": "one"})  # no change, but still folded
    ingest.ingest_events(other.events[3:], defer=True)
    before = projection.state_hash()
    assert list_stale_names() == {"note:a"}
    assert (
        ingest.project_pending() == 0
        and projection.state_hash() == before
        and not list_stale_names()
    )


def test_local_change_folds_pending_events_of_its_aggregate(db, note_rows):
    other = LogBuilder()
    other.append("note.write", "a", {"text": "one"})
    ingest.ingest_events(other.events, defer=True)
    writer.record("note.write", "a", {"text": "two"})
    assert projection.current_state("note:a") == {"text": "two"}
    assert "note:a" not in list_stale_names()


def test_row_with_a_missing_dependency_is_stored_later(db, note_rows):
    other = LogBuilder()
    other.append("note.write", "a", {"text": "wait"})
    ingest.ingest_events(other.events)
    assert note_rows == {} and Aggregate.objects.get(projected=False).name == "note:a"
    other.append("note.write", "other", {"text": "here"})
    ingest.ingest_events(other.events)
    assert (
        note_rows == {"a": "wait", "other": "here"}
        and not Aggregate.objects.filter(projected=False).exists()
    )


# ---- forks and truncation


def test_fork_is_recorded_as_proof_and_its_effects_are_undone(db, note_rows):
    liar = LogBuilder()
    liar.append("note.write", "a", {"text": "one"})
    before_fork = liar.events[:]
    other = liar.sign("note.write", "a", {"text": "to you this"})
    liar.append("note.write", "a", {"text": "to me that"})
    liar.append("note.write", "b", {"text": "and more"})
    ingest.ingest_events(liar.events)
    assert note_rows == {"a": "to me that", "b": "and more"}
    result = ingest.ingest_events([*before_fork, other])
    assert result.forked == [liar.origin]
    proof = ForkProof.objects.get()
    assert proof.seq == 3 and {proof.first["body"], proof.second["body"]} == {
        liar.events[2].body,
        other.body,
    }
    assert note_rows == {"a": "one"}
    assert writer.read_events(liar.origin, 0) == before_fork
    assert writer.log_heads()[liar.origin] == (2, digest(before_fork[-1].body))
    assert projection.state_hash() == recompute_state_hash()
    more = liar.append("note.write", "a", {"text": "go on"})
    assert "ends with event 2: it signed two events with the number 3" in rejection(more)


def test_fork_proof_convinces_a_mirror_with_one_event_or_none(db, note_rows):
    liar = LogBuilder()
    second = liar.sign("note.write", "a", {"text": "to you this"})
    first = liar.append("note.write", "a", {"text": "to me that"})
    with pytest.raises(ingest.UserError, match="no mirror of the list"):
        truncate.accept_fork_proof(first, second, keys={"a" * 64})
    assert truncate.accept_fork_proof(first, second, keys={liar.identity.key})
    assert not truncate.accept_fork_proof(first, second)
    assert "ends with event 1" in rejection(*liar.events)
    assert ingest.ingest_events(liar.events[:1]).stored == 1
    assert truncate.list_fork_proofs() == [(first, second)]
    with pytest.raises(ingest.UserError, match="not two events of one origin"):
        truncate.accept_fork_proof(first, first)
    with pytest.raises(ingest.UserError, match="signature does not match"):
        truncate.accept_fork_proof(first, second.model_copy(update={"body": second.body + " "}))


def test_truncated_log_ends_with_the_last_accepted_event(db, note_rows):
    other = LogBuilder()
    for n in range(4):
        other.append("note.write", "a", {"text": str(n)})
    ingest.ingest_events(other.events[:3])
    short = projection.state_hash()
    ingest.ingest_events(other.events)
    assert truncate.truncate_log(other.origin, 3, "expelled by list 7") == 2
    assert (note_rows, projection.state_hash()) == ({"a": "1"}, short)
    assert truncate.truncate_log(other.origin, 4, "later") == 0
    assert "ends with event 3: expelled by list 7" in rejection(
        other.append("note.write", "a", {"text": "x"})
    )
    with pytest.raises(ingest.UserError, match="no log 00000000 is known here"):
        truncate.truncate_log("0" * 32, 1, "")


def test_site_that_forked_its_own_log_starts_a_new_one(db, note_rows):
    """Restore the site from a backup, so that it reuses numbers of its lost events."""
    writer.record("note.write", "a", {"text": "kept"})
    own_log = Origin.objects.get(ours=True)
    twin = LogBuilder()
    twin.identity = site_identity.identity()
    twin.origin = own_log.pk
    twin.events = writer.read_events(own_log.pk, 0)
    twin.hlc = own_log.head_hlc
    lost = twin.append("note.write", "a", {"text": "lost in the crash"})
    ingest.ingest_events([lost])  # its own log is pulled back from another mirror
    assert projection.current_state("note:a") == {"text": "lost in the crash"}
    assert writer.record("note.write", "a", {"text": "new"}).seq == 4
    twin.append("note.write", "a", {"text": "and this too was out in the world"})
    assert ingest.ingest_events(twin.events).forked == [own_log.pk]
    next_event = writer.record("note.write", "a", {"text": "newer"})
    assert next_event.origin_id != own_log.pk and next_event.seq == 2
    first_event = open_event(writer.read_events(next_event.origin_id, 0)[0])
    assert first_event.payload["after"] == own_log.pk


# ---- commands and the status page


def test_status_page_shows_heads_and_state_hash(db, note_rows):
    event = writer.record("note.write", "a", {"text": "x"})
    status = Client().get("/status").json()
    assert (status["key"], status["state"]) == (
        site_identity.identity().key,
        projection.state_hash(),
    )
    assert status["heads"] == {event.origin_id: {"seq": 2, "digest": event.digest}}
    assert abs(status["time"] - time.time()) < 60


def test_eventlog_command_truncates_rebuilds_and_shows(db, note_rows, capsys):
    other = LogBuilder()
    other.append("note.write", "a", {"text": "one"})
    other.append("note.write", "a", {"text": "two"})
    ingest.ingest_events(other.events)
    call_command("eventlog", "truncate", other.origin, "2", "it lies")
    assert note_rows == {"a": "one"}
    note_rows.clear()
    call_command("eventlog", "rebuild")
    assert note_rows == {"a": "one"}
    call_command("eventlog", "show")
    output = capsys.readouterr().out
    assert (
        "1 events withdrawn" in output
        and "truncated after 2: it lies" in output
        and projection.state_hash() in output
    )
    with pytest.raises(CommandError, match="No log 111 is known here"):
        call_command("eventlog", "truncate", "111", "2", "who")


def test_every_text_column_of_the_log_has_a_maximum_length(db):
    for model in (Origin, LogEvent, Aggregate):
        for column in model._meta.concrete_fields:
            assert column.max_length or not isinstance(column, models.CharField)
