"""Compute hybrid logical timestamps: wall-clock time that never runs behind a seen timestamp. Pure.

A stamp is one integer: milliseconds since 1970 in the upper bits, a counter in the lower 16. A
mirror that has seen an event stamps later events higher, so causes sort before effects even if
clocks disagree slightly. Kulkarni et al., "Logical Physical Clocks", 2014.
"""

from collections.abc import Sequence

from barnraise.protocol.clock import median_clock_offset

MAX_CLOCK_ERROR = 60.0  # seconds that a clock may differ from the others
MAX_STAMP_LEAD = 120.0  # seconds that an acceptable stamp may lie ahead of our clock
COUNTER_BITS = 16


def next_stamp(last: int, now: float) -> int:
    """Return the stamp after `last` at `now` (seconds since 1970); a full counter carries over."""
    return max(last + 1, int(now * 1000) << COUNTER_BITS)


def to_seconds(hlc: int) -> float:
    """Convert a stamp to seconds since 1970."""
    return (hlc >> COUNTER_BITS) / 1000


def clock_correction(offsets: Sequence[float]) -> float:
    """Return the seconds to add to this machine's clock.

    Args:
        offsets: Seconds by which each other mirror's clock is ahead of ours.

    Returns:
        The median offset if it exceeds MAX_CLOCK_ERROR, else 0. With fewer than two other clocks
        the result is 0, because two clocks alone do not show which one is wrong.
    """
    median = median_clock_offset(offsets)
    return median if len(offsets) > 1 and abs(median) > MAX_CLOCK_ERROR else 0.0


def is_too_far_ahead(hlc: int, now: float) -> bool:
    """Return whether adopting the stamp would push our own clock too far into the future."""
    return to_seconds(hlc) > now + MAX_STAMP_LEAD
