"""What senders choose is within what receivers let pass."""

from barnraise.planning.compression_ladder import COMPRESSION_LADDER
from barnraise.planning.round_limits import MIN_ROUND_STEPS, PACE_MARGIN, WINDOW_STRETCH


def test_shortest_round_of_each_level_is_within_the_pace_of_receivers():
    shortest = min(level.min_steps for level in COMPRESSION_LADDER)
    assert PACE_MARGIN * shortest >= WINDOW_STRETCH * MIN_ROUND_STEPS


def test_round_by_the_clock_is_no_shorter_than_receivers_expect():
    """Rounding to a power of two shortens a period by up to the root of two."""
    assert WINDOW_STRETCH <= 2**-0.5
