"""Test event stamps, which only increase and follow the clock of most mirrors."""

import logging
import time
import types

import pytest
from helpers.event_log_builder import LogBuilder, rejection
from hypothesis import given
from hypothesis import strategies as st

from coordinator.eventlog import hlc, ingest, writer

FAR_SECONDS = 3600.0


@given(st.lists(st.floats(0, 4e9), max_size=50))
def test_stamps_increase_and_follow_the_clock(times):
    last = 0
    for now in times:
        after = hlc.next_stamp(last, now)
        assert after > last and hlc.to_seconds(after) >= now - 0.002
        last = after


@pytest.mark.parametrize(
    ("offsets", "seconds"),
    [
        ([], 0),
        ([FAR_SECONDS], 0),  # of two clocks either may be wrong
        ([0, FAR_SECONDS], 0),  # one of the other clocks is wrong
        ([FAR_SECONDS, FAR_SECONDS + 1], FAR_SECONDS),
        ([59, 59, 59], 0),
        ([-61, -61, FAR_SECONDS], -61),
        ([FAR_SECONDS, FAR_SECONDS, 0, 1], 0),
    ],
)
def test_clock_far_from_most_others_is_corrected(offsets, seconds):
    assert hlc.clock_correction(offsets) == seconds


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
