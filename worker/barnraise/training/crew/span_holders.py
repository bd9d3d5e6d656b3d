"""The lead's care for spans that several machines hold: who computes what, and one replica again.

Holders of a span train replicas of their own on their own micro-batches. At a round's end these are
merged by the micro-batches that each has computed (NoLoCo, arXiv 2506.10911, without its momentum),
the first holder encodes the update, and the others apply what it has encoded.
"""

import time
from collections.abc import Collection, Mapping, Sequence

import torch

from barnraise.errors import CrewError
from barnraise.mixing.payloads import decode_weights, encode_weights
from barnraise.training.crew.crew_messages import CallTask, EndRoundTask, FragmentTask
from barnraise.training.crew.crew_orders import CrewOrders, Enclosure
from barnraise.training.crew.routing import RouteDealer, StepRoutes
from barnraise.training.crew.step_protocol import LeadStep

SKIP_SECONDS = 10.0  # for which a machine is left out with which another one cannot go on


class SpanHolders:
    """Deal micro-batches to the holders of spans, and merge what they have learnt.

    Attributes:
        dealt: micro-batches of steps that counted, by machine.
    """

    def __init__(self, orders: CrewOrders) -> None:
        """Begin at a round whose replicas are equal."""
        self._orders, self._roster = orders, orders.links.roster
        self._dealer = RouteDealer(self._roster)
        self._skipped: dict[int, float] = {}  # machine → until when
        self.dealt = dict.fromkeys(range(1, len(self._roster.seats)), 0)
        self._merged: dict[int, dict[int, int]] = {}  # fragment → what was dealt at its last merge

    @property
    def firsts(self) -> list[int]:
        """Return the first holder of each span but the lead's, of those that were not dropped."""
        stages, spans = self._roster.stages, self._roster.spans[1:]
        return [self._orders.first_holder(stages[span[0]].fragments[0]) for span in spans]

    def are_connected(self) -> bool:
        """Return whether each span has a holder with a channel."""
        connected = self._orders.links.connected()
        return all(connected.intersection(span) for span in self._roster.spans[1:])

    def draw_routes(self, position: int) -> StepRoutes:
        """Draw a step's routes; machines without a channel get nothing."""
        now, connected = time.monotonic(), self._orders.links.connected()
        absent = set(self.dealt) - connected
        absent |= {n for n, until in self._skipped.items() if now < until}
        return self._dealer.deal(f"{self._roster.seats[0].key} {position}", absent)

    def record_step(self, side: LeadStep) -> None:
        """Record the micro-batches and the speed of each machine in a step that counts."""
        for number in side.routes.members:
            count = len(side.routes.micro_batches_of(number))
            self.dealt[number] += count
            if number in side.seconds:
                self._dealer.record(number, side.seconds[number] / count)

    def skip(self, number: int, seconds: float = SKIP_SECONDS) -> None:
        """Deal nothing to a machine for a while, if its span has another holder."""
        self._skipped[number] = time.monotonic() + seconds

    def reset_idle(self, routes: StepRoutes) -> None:
        """Drop the round at the machines that had no part in a step that was abandoned."""
        idle = set(self._orders.others) - set(routes.members)
        if idle:
            self._orders.request(CallTask(method="reset_round"), idle)

    def merge_replicas(self, due: Collection[int], flushes: bool) -> None:
        """Give the holders of fragments whose round ends the mean of their replicas.

        Raises:
            CrewError: a machine is gone, or what it sends is no replica.
        """
        for span in self._roster.spans:
            fragments = self._roster.stages[span[0]].fragments
            for i in fragments if len(span) > 1 else ():
                if i in due:
                    self._merge_fragment(i, span, flushes)

    def _merge_fragment(self, i: int, span: Sequence[int], flushes: bool) -> None:
        before = self._merged.get(i, {})
        self._merged[i] = dict(self.dealt)
        task = FragmentTask(fragment=i, part="replica", flushes=flushes)
        answers = self._orders.request(task, span)
        steps = {number: self.dealt[number] - before.get(number, 0) for number in answers}
        if not any(steps.values()):
            return
        size = self._roster.model.fragments()[i].size
        mean = torch.zeros(size)
        for number, answer in sorted(answers.items()):
            try:
                (payload,) = answer.payloads
                replica = decode_weights(payload, size, 32)
            except ValueError as error:
                self._orders.links.record_fault(number)
                name = self._roster.name_of(number)
                raise CrewError(f"{name} sent a replica that is of no use: {error}") from None
            mean.add_(replica, alpha=steps[number] / sum(steps.values()))
        enclosure = Enclosure(i, encode_weights(mean, 32))
        self._orders.request(task, span, {number: [enclosure] for number in span})

    def forward_parts(self, task: EndRoundTask, parts: Mapping[int, bytes]) -> None:
        """Have the other holders of spans end the round with what the first ones have encoded."""
        others = set(self._orders.others) - set(self.firsts)
        if not others:
            return
        enclosures = {
            number: [
                Enclosure(i, parts[i]) for i in self._roster.stages[number].fragments if i in parts
            ]
            for number in others
        }
        self._orders.request(task, others, enclosures)
