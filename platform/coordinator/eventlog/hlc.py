"""Hybrid logical time: as wall clocks say, yet never behind what was seen before. Pure.

A stamp is one integer: milliseconds since 1970 in the upper bits, a counter in the lower 16. Who saw an event stamps
later ones higher, so that causes sort before effects even where clocks disagree a little.
"""

from collections.abc import Sequence

MAX_CLOCK_ERROR = 60.0  # seconds that a clock may be from the others'
MAX_STAMP_LEAD = 120.0  # …and that a stamp may be ahead of ours, before it has to wait
COUNTER_BITS = 16  # bits


def next_stamp(last: int, now: float) -> int:
    """The next stamp after `last`, at `now` seconds since 1970. A counter that is full runs over into the time."""
    return max(last + 1, int(now * 1000) << COUNTER_BITS)


def to_seconds(hlc: int) -> float:
    """Since 1970."""
    return (hlc >> COUNTER_BITS) / 1000


def clock_correction(offsets: Sequence[float]) -> float:
    """Seconds to add to this machine's clock, from how far the others' are ahead of it. 0 while it is within APART of
    their median; of two in the middle the nearer counts, so that one wrong clock of two moves nobody. With fewer than
    two others nobody can tell who is wrong."""
    median = median_offset(offsets)
    return median if len(offsets) > 1 and abs(median) > MAX_CLOCK_ERROR else 0.0


def median_offset(offsets: Sequence[float]) -> float:
    """Their median; 0 without any."""
    if not offsets:
        return 0.0
    ordered = sorted(offsets)
    return min(ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2], key=abs)


def is_too_far_ahead(hlc: int, now: float) -> bool:
    """Whether a stamp is so far in the future that taking it over would spoil this clock too."""
    return to_seconds(hlc) > now + MAX_STAMP_LEAD
