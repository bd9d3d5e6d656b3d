"""Test recording events of this site: numbered, chained, signed, stamped and served."""

import logging
import threading
import time
import types
from datetime import UTC, datetime

import pytest
from django.conf import settings
from django.db import connection
from helpers.mirrors.event_log_builder import LogBuilder, recompute_state_hash

from barnraise.protocol.signing import digest
from coordinator.eventlog import database_owner, hlc, ingest, projection, writer
from coordinator.eventlog.event import NO_DIGEST, open_event
from coordinator.eventlog.models import Aggregate, LogEvent, Origin, PeerClock
from coordinator.lib import site_identity
from coordinator.lib.exceptions import OtherSiteError, RestorePendingError
from coordinator.lib.ttl_cache import TtlCache


def test_recorded_event_is_numbered_chained_signed_and_folded(db, note_rows):
    first = writer.record("note.write", "a", {"text": "one"})
    second = writer.record("note.write", "note:a", {"text": "two"})
    origin = Origin.objects.get()
    assert (origin.key, origin.ours, origin.head_seq) == (site_identity.identity().key, True, 3)
    first_event, *notes = writer.read_events(origin.pk, 0)
    assert open_event(first_event).type == "origin.begin"
    assert open_event(first_event).prev == NO_DIGEST
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


def test_local_change_folds_pending_events_of_its_aggregate(db, note_rows):
    other = LogBuilder()
    other.append("note.write", "a", {"text": "one"})
    ingest.ingest_events(other.events, defer=True)
    writer.record("note.write", "a", {"text": "two"})
    assert projection.current_state("note:a") == {"text": "two"}
    assert not Aggregate.objects.get(pk="note:a").stale


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


FAR_SECONDS = 3600.0


def test_wrong_clock_is_logged_and_events_are_stamped_with_peers_time(db, note_rows, caplog):
    right = time.time() - FAR_SECONDS
    writer.record_peer_clock("1" * 64, right)
    writer.record_peer_clock("2" * 64, right + 1)
    with caplog.at_level(logging.ERROR):
        event = writer.record("note.write", "a", {"text": "x"})
    assert abs(hlc.to_seconds(event.hlc) - right) < 5
    assert (
        "+3599 s from the other mirrors'" in caplog.text
        or "+3600 s from the other mirrors'" in caplog.text
    )
    assert writer.clock_offset() == pytest.approx(FAR_SECONDS, abs=5)


def test_clock_set_wrong_between_measurements_stamps_true_time(db, note_rows, monkeypatch):
    right = time.time()
    for key in ("1", "2"):
        writer.record_peer_clock(key * 64, right)
    wrong_clock = types.SimpleNamespace(**{**vars(time), "time": lambda: time.time() + FAR_SECONDS})
    monkeypatch.setattr(writer, "time", wrong_clock)
    event = writer.record("note.write", "a", {"text": "x"})
    assert abs(hlc.to_seconds(event.hlc) - right) < 5


def test_read_events_serves_no_more_than_its_limits(db, note_rows, monkeypatch):
    events = [writer.record("note.write", "a", {"text": str(n)}) for n in range(4)]
    log = events[0].origin_id
    assert [open_event(signed).seq for signed in writer.read_events(log, 2, limit=2)] == [3, 4]
    monkeypatch.setattr(writer, "MAX_SERVED", 3)
    assert len(writer.read_events(log, 0, limit=10**9)) == 3
    assert writer.read_events(log, 5) == writer.read_events("0" * 32, 0) == []


def test_restored_site_records_nothing_and_resumes_with_one_new_log(db, note_rows):
    former = writer.record("note.write", "a", {"text": "one"}).origin_id
    writer.abandon_log(wait_for_mirrors=True)
    with pytest.raises(RestorePendingError):
        writer.record("note.write", "a", {"text": "two"})
    assert writer.record_existing_rows() == 0 and LogEvent.objects.count() == 2
    for _ in range(2):
        writer.resume()
    new = Origin.objects.get(ours=True)
    assert Origin.objects.count() == 2 and projection.current_state(f"origin:{new.pk}") == {
        "name": settings.MIRROR_NAME,
        "after": former,
    }


def test_log_of_another_key_is_continued_only_in_a_new_log(db, note_rows):
    former = writer.record("note.write", "a", {"text": "one"})
    Origin.objects.filter(pk=former.origin_id).update(key="f" * 64)
    with pytest.raises(OtherSiteError, match="belongs to mirror ffffffff"):
        writer.record("note.write", "a", {"text": "two"})
    assert LogEvent.objects.count() == 2, "two hosts would end each other's logs for ever"
    database_owner.change_owner()
    event = writer.record("note.write", "a", {"text": "two"})
    assert (event.seq, event.key) == (2, site_identity.identity().key)
    assert not Origin.objects.get(pk=former.origin_id).ours
    assert projection.current_state("note:a") == {"text": "two"}


@pytest.mark.parametrize(
    ("changed", "is_used"),
    [
        ({}, True),
        ({"uptime": -1e6}, False),  # measured long ago, whatever the clock says
        ({"boot_id": "another", "uptime": -1e6}, True),  # the uptime of another boot means nothing
        ({"boot_id": "another", "measured_at": datetime(2020, 1, 1, tzinfo=UTC)}, False),
    ],
)
def test_only_recent_measurements_of_clocks_count(db, changed, is_used):
    writer.record_peer_clock("1" * 64, time.time() - FAR_SECONDS)
    writer.record_peer_clock("1" * 64, time.time() - FAR_SECONDS)
    PeerClock.objects.update(**changed)
    TtlCache.clear_all()
    assert writer.clock_offset() == pytest.approx(FAR_SECONDS if is_used else 0, abs=5)
