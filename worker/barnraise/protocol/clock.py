"""By how much two clocks may differ, and for whom; what an answer shows of another clock. Pure."""

from collections.abc import Sequence
from statistics import median

# A request is signed with a time. When a mirror corrects the time by more, the request is worth
# signing again, and the other mirrors' clocks are worth a look.
REQUEST_CLOCK_SECONDS = 1.0
# A machine's clock that differs from the site's by more is reported to its owner, in the log and by
# `barnraise doctor`: peers hold back updates from the future.
OWNER_CLOCK_SECONDS = 5.0
JITTER_SECONDS = 0.1  # by which two measurements of one offset may differ besides


def estimate_offset(
    other_time: float, now: float, round_trip: float, known: float = 0.0
) -> float | None:
    """Return by how many seconds another clock is ahead of this one, as an answer shows.

    The other clock was read at some moment of the round trip, which took so many seconds of the
    monotonic clock until `now`. So the offset lies in an interval of that length: what was known
    before stays if it does, or else the middle is closest (Cristian 1989, "Probabilistic clock
    synchronization"). None if the round trip took too long to show anything.
    """
    if round_trip > 2 * OWNER_CLOCK_SECONDS:
        return None
    middle = other_time - now + round_trip / 2
    return known if abs(known - middle) <= round_trip / 2 + JITTER_SECONDS else middle


def median_clock_offset(offsets: Sequence[float]) -> float:
    """Return the seconds to add to this machine's clock, given each mirror's.

    It is the median. Of an even number of mirrors this machine's own clock decides.
    """
    if not offsets:
        return 0.0
    voters = [*offsets, 0.0] if len(offsets) % 2 == 0 else offsets
    return median(voters)


def is_clock_wrong(seconds_ahead: float, round_trip: float = 0.0) -> bool:
    """Return whether a difference is more than an owner's clock may have, or a delay explains."""
    return abs(seconds_ahead) > OWNER_CLOCK_SECONDS + round_trip
