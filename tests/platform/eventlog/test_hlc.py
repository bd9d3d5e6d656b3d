"""Test event stamps, which only increase and follow the clock of most mirrors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.eventlog import hlc

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
