"""Test ingesting events of other mirrors: verified, stored whole or not at all, and folded."""

import time
from random import Random

import pytest
from django.db import models
from helpers.effort import examples
from helpers.mirrors.event_log_builder import (
    LogBuilder,
    NotePayload,
    recompute_state_hash,
    rejection,
)
from helpers.mirrors.rebuild_site import LOG
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from barnraise.errors import MessageError
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import digest
from coordinator.eventlog import ingest, projection, registry, writer
from coordinator.eventlog.event import MAX_EVENT_CHARS, NO_DIGEST, open_event
from coordinator.eventlog.models import Aggregate, ForkProof, LogEvent, Origin

FAR_SECONDS = 3600.0


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
    assert ingest.project_pending() == 0
    assert projection.state_hash() == before
    assert not list_stale_names()


def test_row_with_a_missing_dependency_is_stored_later(db, note_rows):
    other = LogBuilder()
    other.append("note.write", "a", {"text": "wait"})
    ingest.ingest_events(other.events)
    assert note_rows == {} and Aggregate.objects.get(projected=False).name == "note:a"
    other.append("note.write", "other", {"text": "here"})
    ingest.ingest_events(other.events)
    assert note_rows == {"a": "wait", "other": "here"}
    assert not Aggregate.objects.filter(projected=False).exists()


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


def test_every_text_column_of_the_log_has_a_maximum_length(db):
    for model in (Origin, LogEvent, Aggregate):
        for column in model._meta.concrete_fields:
            assert column.max_length or not isinstance(column, models.CharField)


def test_event_from_the_future_is_refused_until_its_time(db, note_rows):
    other = LogBuilder()
    ingest.ingest_events(other.events)
    soon = other.append("note.write", "a", {"text": "x"}, at=time.time() + FAR_SECONDS)
    assert "ahead of this site's time: later" in rejection(soon)
    writer.record_peer_clock("1" * 64, time.time() + FAR_SECONDS)
    writer.record_peer_clock(
        "2" * 64, time.time() + FAR_SECONDS
    )  # now this site's clock counts as wrong
    assert ingest.ingest_events([soon]).stored == 1


def build_logs() -> list[LogBuilder]:
    """Build the logs of three mirrors, which write about the same notes at the same time."""
    logs = [LogBuilder(seed) for seed in (1, 2, 3)]
    for n in range(4):
        for log in logs:
            log.append("note.write", n % 3, {"text": f"{log.origin[-1]} wrote {n}"})
    return logs


@settings(
    max_examples=examples(5, 40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.integers())
def test_logs_in_any_order_and_repeated_lead_to_one_state(db, note_rows, seed):
    random = Random(seed)
    logs = build_logs()
    states = []
    for _ in range(2):
        for model in LOG:
            model.objects.all().delete()
        note_rows.clear()
        arrived = {log.origin: 0 for log in logs}
        while waiting := [log for log in logs if arrived[log.origin] < len(log.events)]:
            log = random.choice(waiting)
            begin = random.randint(0, arrived[log.origin])  # what came before comes again
            end = random.randint(arrived[log.origin], len(log.events))
            result = ingest.ingest_events(log.events[begin:end], defer=random.random() < 0.5)
            assert not result.rejected and result.stored == end - arrived[log.origin]
            arrived[log.origin] = end
        ingest.project_pending()
        states.append((projection.state_hash(), dict(note_rows)))
    assert states[0] == states[1] and len(note_rows) == 3
    assert projection.state_hash() == recompute_state_hash() != NO_DIGEST


def test_batch_with_a_repetition_counts_each_event_once(db, note_rows):
    other = LogBuilder()
    other.append("note.write", "a", {"text": "one"})
    assert ingest.ingest_events([*other.events, *other.events]).stored == 2
    assert ingest.ingest_events([]) == ingest.IngestResult()
    two = [LogBuilder(4).events[0], LogBuilder(4).append("note.write", "a", {"text": "x"})]
    assert "has a hole" in rejection(*reversed(two)), "a log's events must ascend"


def test_batch_that_cannot_be_opened_stores_no_log_at_all(db, note_rows):
    good, other = LogBuilder(1), LogBuilder(2)
    unsigned = other.events[0].model_copy(update={"signature": "0" * 128})
    assert "signature" in rejection(*good.events, unsigned)

    def read():
        raise MessageError("the page is malformed")

    assert rejection(*good.events, read=read) == "The page is malformed."
    assert not Origin.objects.filter(pk=good.origin).exists()
