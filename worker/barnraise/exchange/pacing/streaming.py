"""A round said in turns: when in it which fragments are said. Pure.

An update that fills its line for most of a round is late by most of a round. Said in turns it is not: a fragment's
round ends when the line has carried those before it, so that each is late by no more than its own bytes, of the same
bytes in all (Streaming DiLoCo, arXiv 2501.18512, spreads its fragments alike, and waits for them).
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache

MOST = 8  # turns of a round
SECONDS, STEPS = (
    2.0,
    2,
)  # that one lasts at the least: shorter ones save less than their headers and fsyncs cost
NEAR = 1e-6  # of a round: the same moment, counted since 1970 in floats


@dataclass(frozen=True)
class Turns:
    """`ends`: of a round, ascending, the last 1.0; `parts`: the fragments said at each, by index."""

    ends: tuple[float, ...]
    parts: tuple[range, ...]

    def next(self, at: float) -> float:
        """The first end after `at`, both in rounds since whenever."""
        rounds, turn = divmod(self._ended(at), len(self.ends))
        return rounds + self.ends[turn]

    def due(self, since: float, now: float) -> frozenset[int]:
        """Fragments whose turn ended after `since` and not after `now`, in rounds since whenever."""
        if now - since >= 1:
            return frozenset(i for part in self.parts for i in part)
        return frozenset(
            i for turn in range(self._ended(since), self._ended(now)) for i in self._part(turn)
        )

    def _ended(self, at: float) -> int:
        """How many turns have, since whenever."""
        whole = math.floor(at)
        return whole * len(self.ends) + bisect_right(self.ends, at - whole + NEAR)

    def _part(self, turn: int) -> range:
        return self.parts[turn % len(self.parts)]


@cache
def turns(sizes: tuple[int, ...], most: int) -> Turns:
    """At most so many turns of fragments of these sizes, in order, as even as whole fragments allow. A rest that is too
    small for one goes with the last."""
    total, ends, parts = sum(sizes), [], []
    begin = said = 0
    for i, size in enumerate(sizes):
        said += size
        if said * most >= total * (len(ends) + 1) and (total - said) * 2 * most >= total:
            ends.append(said / total)
            parts.append(range(begin, i + 1))
            begin = i + 1
    return Turns((*ends, 1.0), (*parts, range(begin, len(sizes))))


def fitting(sizes: tuple[int, ...], seconds: float, steps: int) -> Turns:
    """The turns of a round of so many seconds and steps; a single one where there is no room for two."""
    return turns(sizes, max(1, int(min(MOST, seconds / SECONDS, steps / STEPS))))
