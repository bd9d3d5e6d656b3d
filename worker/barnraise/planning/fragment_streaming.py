"""Spread the fragments of a round's update over the round: which are published when. Pure.

An update that fills its uplink for most of a round arrives late by most of a round. Streaming
avoids that: the fragments are published in several parts, and a part's round ends when the uplink
has carried the parts before it. Each is then late at most by its own transfer, and the bytes
are the same. Streaming DiLoCo (Douillard et al., arXiv 2501.18512, “streaming partial updates”)
spreads its fragments alike; it waits for them, which Barnraise does not.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache

from barnraise.planning.round_limits import MAX_PARTS, MIN_PART_SECONDS, MIN_PART_STEPS

TIME_TOLERANCE = 1e-6  # rounds: times since 1970 that are closer than this are the same moment


@dataclass(frozen=True)
class StreamingSchedule:
    """When in a round which fragments are published.

    All times are in rounds since an arbitrary origin, so that the n-th round is the interval [n, n
    + 1).

    Attributes:
        ends: For each part, the point of the round at which it is published, ascending; the last is
            1.0.
        parts: For each part, the indices of its fragments.
    """

    ends: tuple[float, ...]
    parts: tuple[range, ...]

    def next_end(self, now: float) -> float:
        """Return the first end of a part after `now`, both in rounds."""
        rounds, part = divmod(self._count_ended(now), len(self.ends))
        return rounds + self.ends[part]

    def fragments_due(self, since: float, now: float) -> frozenset[int]:
        """Return the fragments whose part ended after `since`, up to `now`, both in rounds."""
        if now - since >= 1:
            return frozenset(i for part in self.parts for i in part)
        ended = range(self._count_ended(since), self._count_ended(now))
        return frozenset(i for part in ended for i in self.parts[part % len(self.parts)])

    def _count_ended(self, now: float) -> int:
        """Count the parts that have ended since the origin."""
        whole = math.floor(now)
        return whole * len(self.ends) + bisect_right(self.ends, now - whole + TIME_TOLERANCE)


@cache
def split_evenly(sizes: tuple[int, ...], max_parts: int) -> StreamingSchedule:
    """Split fragments, in order, into parts that are as even as whole fragments allow.

    Args:
        sizes: The elements of each fragment.
        max_parts: The number of parts at most; a rest that is too small for a part joins the last
            one.
    """
    total = sum(sizes)
    ends: list[float] = []
    parts: list[range] = []
    first = 0  # fragment of the current part
    elements = 0  # of all fragments so far
    for i, size in enumerate(sizes):
        elements += size
        is_full = elements * max_parts >= total * (len(ends) + 1)
        rest_is_large = (total - elements) * 2 * max_parts >= total
        if is_full and rest_is_large:
            ends.append(elements / total)
            parts.append(range(first, i + 1))
            first = i + 1
    return StreamingSchedule((*ends, 1.0), (*parts, range(first, len(sizes))))


def fit_to_round(
    sizes: tuple[int, ...], seconds: float, steps: int, min_part_seconds: float = 0.0
) -> StreamingSchedule:
    """Split a round into parts that are long enough; a single part if there is no room for two."""
    shortest = max(MIN_PART_SECONDS, min_part_seconds)
    parts = int(min(MAX_PARTS, seconds / shortest, steps / MIN_PART_STEPS))
    return split_evenly(sizes, max(1, parts))
