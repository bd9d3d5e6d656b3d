"""Which holder of each span computes each micro-batch of a step. Pure.

The lead wires every step at random, by SWARM's rule (Ryabinin et al., arXiv 2301.11913, section
3.2): each span has a heap of its holders by accumulated predicted seconds, and a micro-batch goes
to the first one. A holder's seconds a micro-batch are a moving average of what it has reported.
"""

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random

from barnraise.training.crew.roster import LEAD, CrewRoster

NEWEST_PART = 0.25  # of the last measurement in a moving average


@dataclass(frozen=True)
class StepRoutes:
    """The way of each micro-batch of one step.

    Attributes:
        roster: the crew.
        routes: for each micro-batch the machine of each span; empty where spans have one holder.
    """

    roster: CrewRoster
    routes: Sequence[Sequence[int]] = ()

    def is_valid(self) -> bool:
        """Return whether each micro-batch has one holder of each span."""
        spans = self.roster.spans
        return not self.routes or (
            len(self.routes) == self.roster.micro_batches
            and all(
                len(route) == len(spans)
                and all(number in span for number, span in zip(route, spans, strict=True))
                for route in self.routes
            )
        )

    def as_lists(self) -> list[list[int]]:
        """Return the routes as a message states them."""
        return [list(route) for route in self.routes]

    def micro_batches_of(self, number: int) -> list[int]:
        """Return the micro-batches that a machine computes."""
        if not self.routes:
            return list(range(self.roster.micro_batches))
        return [m for m, route in enumerate(self.routes) if number in route]

    @property
    def members(self) -> list[int]:
        """Return the machines but the lead that compute any."""
        if not self.routes:
            return list(range(1, len(self.roster.seats)))
        return sorted({number for route in self.routes for number in route} - {LEAD})

    def neighbours(self, number: int) -> set[int]:
        """Return the machines with which one needs a channel in this step."""
        return self.roster.neighbours(number) & {LEAD, *self.members}

    def sender_of(self, key: int, m: int) -> int:
        """Return which machine computes an activation or a gradient of a micro-batch."""
        return self._choose(self.roster.sender_of(key), m)

    def receiver_of(self, key: int, m: int) -> int:
        """Return which machine needs an activation or a gradient of a micro-batch."""
        return self._choose(self.roster.receiver_of(key), m)

    def _choose(self, number: int, m: int) -> int:
        """Return the holder that computes a micro-batch, of the span of one of its holders."""
        return self.routes[m][self.roster.span_numbers[number]] if self.routes else number


class RouteDealer:
    """Deal micro-batches to the holders of each span, by their measured speeds."""

    def __init__(self, roster: CrewRoster) -> None:
        """Begin without measurements."""
        self._roster = roster
        self._seconds: dict[int, float] = {}  # a micro-batch, by machine
        self._accumulated = dict.fromkeys(range(len(roster.seats)), 0.0)

    def record(self, number: int, seconds: float) -> None:
        """Add a measurement of a machine's seconds a micro-batch."""
        before = self._seconds.get(number, seconds)
        self._seconds[number] = before + NEWEST_PART * (seconds - before)

    def deal(self, seed: str, absent: Collection[int] = ()) -> StepRoutes:
        """Draw a step's routes, the same for the same seed and measurements.

        Args:
            seed: of what is random.
            absent: machines that get nothing, unless all holders of their span are absent.
        """
        roster = self._roster
        if roster.has_single_holders:
            return StepRoutes(roster)
        random = Random(seed)
        columns = [self._deal_span(span, random, absent) for span in roster.spans]
        return StepRoutes(roster, tuple(zip(*columns, strict=True)))

    def _deal_span(self, span: Sequence[int], random: Random, absent: Collection[int]) -> list[int]:
        present = [number for number in span if number not in absent] or list(span)
        accumulated = self._accumulated
        # One that was absent begins where the others are, and does not have to catch up.
        newest = max(accumulated[number] for number in present)
        longest = max((self._find_seconds(number, span) for number in present), default=0.0)
        heap = [
            (max(accumulated[number], newest - longest), random.random(), number)
            for number in present
        ]
        heapq.heapify(heap)
        dealt: list[int] = []
        for _ in range(self._roster.micro_batches):
            seconds, _, number = heap[0]
            dealt.append(number)
            seconds += self._find_seconds(number, span)
            heapq.heapreplace(heap, (seconds, random.random(), number))
        first = heap[0][0]
        for seconds, _, number in heap:
            accumulated[number] = seconds - first
        return dealt

    def _find_seconds(self, number: int, span: Sequence[int]) -> float:
        """Return a machine's seconds a micro-batch; without a measurement, its span's least."""
        known = [self._seconds[each] for each in span if each in self._seconds]
        return self._seconds.get(number, min(known, default=1.0))
