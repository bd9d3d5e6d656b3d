"""Test what an answer shows of another clock: a delay is no difference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.protocol.clock import (
    JITTER_SECONDS,
    OWNER_CLOCK_SECONDS,
    estimate_offset,
    is_clock_wrong,
)

NOW = 1e9


@given(
    st.floats(-1e6, 1e6),
    st.floats(0, 1),
    st.floats(0, 2 * OWNER_CLOCK_SECONDS),
    st.floats(-1e6, 1e6),
)
def test_estimate_is_within_the_round_trip_of_the_true_offset(offset, share, round_trip, known):
    shown = NOW - share * round_trip + offset  # the other clock, read at some moment of the trip
    estimate = estimate_offset(shown, NOW, round_trip, known)
    assert estimate is not None and abs(estimate - offset) <= round_trip + JITTER_SECONDS + 1e-3
    if known != estimate:
        assert abs(estimate - offset) <= round_trip / 2 + 1e-3
    again = estimate_offset(shown, NOW, round_trip, estimate)
    assert again == pytest.approx(estimate), "the same answer shows nothing new"


def test_late_answer_is_no_wrong_clock():
    assert abs(estimate_offset(NOW - 8.25, NOW, 8.25) or 0.0) <= 4.2
    assert abs(estimate_offset(NOW, NOW, 0.02, -4.125) or 0.0) <= 0.1
    assert estimate_offset(NOW + 60, NOW, 10.1, 3.0) is None, "it took too long"
    assert estimate_offset(NOW + 52, NOW, 8.0, 60.0) == 60.0, "what is known fits"


def test_difference_that_a_delay_explains_is_no_wrong_clock():
    assert is_clock_wrong(-5.1) and not is_clock_wrong(5.0)
    assert not is_clock_wrong(13.0, 8.0) and is_clock_wrong(-13.1, 8.0)
