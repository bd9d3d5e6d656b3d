"""A step of a crew, as each machine sees it: two-phase commit (Gray 1978) over its channels.

The lead sends the order to make a step. Activations pass from machine to machine, gradients back.
Each machine then sends the norms of its gradients and is *prepared*: it changes no weight, and
waits for the lead's decision. The lead adds all norms in index order, as one machine does, and
decides that the step applies. Whatever fails before cancels the step on all machines, and it is
made again; a channel that breaks after it gets the decision once it is open again.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from barnraise.errors import LeadLostError
from barnraise.mixing.payloads import are_finite, decode_weights, encode_weights
from barnraise.swap.executor import join_norms
from barnraise.training.crew.crew_frames import PayloadId, PieceKind
from barnraise.training.crew.crew_links import ChannelWatch, CrewLinks
from barnraise.training.crew.crew_messages import (
    BrokenStep,
    ControlMessage,
    Norms,
    Order,
    Reply,
    StepDecision,
    Verdict,
)
from barnraise.training.crew.roster import LEAD
from barnraise.training.crew.routing import StepRoutes

WAIT_SECONDS = 86_400.0  # for activations: the sign of life of the channels decides
STREAM_SECONDS = 300.0  # for which the next part of a validation is awaited
LEAD_SECONDS = 60.0  # without the lead, for which a prepared machine waits for its decision
GONE_ON = "the lead has restarted since the step began"


def decode_stream(payload: bytearray) -> Tensor | None:
    """Return the anchor's outputs, fp32 [n], that another machine sent; None if not all finite."""
    try:
        return decode_weights(payload, len(payload) // 4, 32)
    except ValueError:
        return None


class CrewStep(ABC):
    """A machine's side of a step, as far as it is the same on all of them.

    Attributes:
        micro_batches: that this machine computes, of the step's.
        problem: a sentence that says why the step was cancelled; "" if it was not.
        has_diverged: whether what a machine computed is not finite.
    """

    def __init__(
        self, links: CrewLinks, order: int, should_stop: Callable[[], bool], routes: StepRoutes
    ) -> None:
        """Begin the step of an order, whose micro-batches have these routes."""
        self.links, self.roster, self.order = links, links.roster, order
        self.routes = routes
        self.micro_batches = routes.micro_batches_of(links.number)
        self.problem = ""
        self.has_diverged = False
        self._should_stop = should_stop
        self._started = time.perf_counter()
        self._waited_seconds = 0.0
        self._watch = ChannelWatch(links, routes.neighbours(links.number))
        links.start_order(order)

    @property
    def work_seconds(self) -> float:
        """Return the seconds of this machine's own work so far, without waiting for others."""
        return time.perf_counter() - self._started - self._waited_seconds

    @property
    def is_cancelled(self) -> bool:
        """Whether the step can no longer count."""
        if not self.problem:
            self.problem = self._find_problem()
        return bool(self.problem)

    def _find_problem(self) -> str:
        """Return a sentence that says why the step cannot count; "" if it can."""
        if self._should_stop():
            return "this machine pauses or leaves"
        lost = self._watch.find_ended()
        return "" if lost is None else self._describe_lost(lost)

    def _describe_lost(self, number: int) -> str:
        return f"{self.roster.name_of(number)} has no channel: {self.links.reason(number)}"

    def sends(self, key: int) -> bool:
        """Return whether another machine needs what this one stores under a key."""
        return self._is_elsewhere(self.roster.receiver_of(key))

    def receives(self, key: int) -> bool:
        """Return whether another machine computes what this one needs under a key."""
        return self._is_elsewhere(self.roster.sender_of(key))

    def _is_elsewhere(self, number: int) -> bool:
        spans = self.roster.span_numbers
        return spans[number] != spans[self.links.number]

    def send(self, key: int, m: int, x: Tensor) -> None:
        """Send activations or gradients, fp32 [sequences, context, width], to who needs them."""
        if self.problem:
            return
        values = x.detach().to("cpu", torch.float32).reshape(-1)
        if not are_finite(values):
            self._diverge()
            return
        bits = self.roster.seating.boundary_bits
        payload = encode_weights(values, bits)
        part = self.micro_batches[m]
        of = PayloadId(PieceKind.BOUNDARY, self.order, part, key)
        self.links.send_payload(self.routes.receiver_of(key, part), of, payload)

    def _diverge(self) -> None:
        """End a step whose activations or gradients are not finite."""
        self.has_diverged = True
        self.problem = "the step has diverged"

    def receive(self, key: int, m: int) -> Tensor | None:
        """Wait for activations or gradients; None if the step is cancelled meanwhile."""
        links, roster, part = self.links, self.roster, self.micro_batches[m]
        sender = self.routes.sender_of(key, part)
        of = PayloadId(PieceKind.BOUNDARY, self.order, part, key)
        asked_at = time.perf_counter()
        is_here = links.wait(
            lambda: links.has_payload(sender, of), WAIT_SECONDS, lambda: self.is_cancelled
        )
        self._waited_seconds += time.perf_counter() - asked_at
        if not is_here:
            return None
        payload = links.pop_payload(sender, of)
        if payload is None:  # the channel has ended in this moment
            return None
        try:
            bits = roster.seating.boundary_bits
            values = decode_weights(payload, roster.boundary_elements, bits)
        except ValueError as error:
            self._refuse(sender, error)
            return None
        return values.view(roster.sequences, roster.model.context, roster.model.width)

    @abstractmethod
    def agree(self, losses: list[float], norms: Mapping[int, float]) -> tuple[float, float] | None:
        """Return the step's loss and its whole gradient's norm; None if it is cancelled."""

    def _refuse(self, sender: int, error: ValueError) -> None:
        """End a step for which another machine sent what is of no use."""
        self.problem = f"what {self.roster.name_of(sender)} sent is of no use: {error}"


class LeadStep(CrewStep):
    """The lead's side of a step.

    Attributes:
        seconds: of each machine's own work, as those that have ended their part state them.
        broken: a machine with which another one cannot go on; None if there is none.
        has_refused: whether that is because of what it sent.
    """

    def __init__(
        self, links: CrewLinks, order: int, should_stop: Callable[[], bool], routes: StepRoutes
    ) -> None:
        """Begin the step of an order, whose micro-batches have these routes."""
        super().__init__(links, order, should_stop, routes)
        self._norms: dict[int, list[float | None]] = {}  # by machine
        self.seconds: dict[int, float] = {}
        self.broken: int | None = None
        self.has_refused = False

    def _refuse(self, sender: int, error: ValueError) -> None:
        super()._refuse(sender, error)
        self.broken = sender
        self.has_refused = True
        self.links.end_link(sender, f"its activations are of no use: {error}")

    def _find_problem(self) -> str:
        self._read_messages()
        restarted = self.links.find_restarted()
        if restarted is not None:
            return f"{self.roster.name_of(restarted)} has restarted"
        return self.problem or super()._find_problem()

    def _read_messages(self) -> bool:
        """Read what the others have sent about this step; return whether all norms are here."""
        others = self.routes.members
        for number in others:
            while (message := self.links.pop_message(number)) is not None:
                self._read_message(number, message)
        return len(self._norms) == len(others)

    def _read_message(self, number: int, message: ControlMessage) -> None:
        name = self.roster.name_of(number)
        match message:
            case Norms(number=self.order):
                self._norms[number] = message.norms
                self.seconds[number] = message.seconds
                if len(message.norms) != len(self.roster.stages[number].fragments):
                    self.problem = f"{name} sent norms of other fragments than its own"
                    self.links.end_link(number, "its norms are of other fragments than its own")
            case BrokenStep(number=self.order):
                neighbour = min(message.neighbour, len(self.roster.seats) - 1)
                self.broken = neighbour
                self.problem = f"between {name} and {self.roster.name_of(neighbour)}: "
                self.problem += message.problem
                self.has_diverged = message.diverged
                self.has_refused = message.refused
            case Reply(number=self.order) if message.problem:
                self.problem = f"{name}: {message.problem}"
            case _:
                pass  # of an earlier order

    def agree(self, losses: list[float], norms: Mapping[int, float]) -> tuple[float, float] | None:
        """Wait for all norms, and decide; None if the step is cancelled before that.

        Of several holders of a fragment each has the gradient of its own micro-batches. The whole
        one is at most as long as all of them together, which counts.
        """
        links, roster = self.links, self.roster
        self.seconds[LEAD] = self.work_seconds
        if not links.wait(self._read_messages, WAIT_SECONDS, lambda: self.is_cancelled):
            return None
        if self.is_cancelled:
            return None
        whole = dict(norms)
        for number, values in self._norms.items():
            fragments = roster.stages[number].fragments
            for i, value in zip(fragments, values, strict=True):
                whole[i] = whole.get(i, 0.0) + (math.nan if value is None else value)
        loss, norm = sum(losses), join_norms(whole[i] for i in sorted(whole))
        if math.isfinite(loss) and math.isfinite(norm):
            self._decide("apply", loss, norm)
        else:
            self._decide("abandon")
        return loss, norm

    def cancel(self) -> None:
        """Cancel the step on all machines; one that has diverged is abandoned there as well."""
        self._decide("abandon" if self.has_diverged else "cancel")

    def _decide(self, verdict: Verdict, loss: float = 0.0, norm: float = 0.0) -> None:
        decision = StepDecision(
            epoch=self.roster.epoch, number=self.order, verdict=verdict, loss=loss, norm=norm
        )
        self.links.send_decision(decision, self.routes.members)


class MemberStep(CrewStep):
    """Another machine's side of a step."""

    def __init__(
        self, links: CrewLinks, order: int, should_stop: Callable[[], bool], routes: StepRoutes
    ) -> None:
        """Begin the step of an order, whose micro-batches have these routes."""
        super().__init__(links, order, should_stop, routes)
        self._is_decided = False

    def _find_problem(self) -> str:
        is_dead = self._is_overtaken()
        decision = self._pop_decision()
        if decision is not None:
            return "the lead has cancelled the step"
        if is_dead:
            return GONE_ON
        problem = super()._find_problem()
        lost = self._watch.find_ended() if problem else None
        if lost is not None and lost != LEAD:
            self.report_broken(lost, problem)
        return problem

    def _is_overtaken(self) -> bool:
        """Return whether a later order is here: without a decision the lead has died meanwhile.

        A lead decides on a step before it gives another order, and a restarted one decides on none.
        """
        return self.links.has_message(
            LEAD, lambda message: isinstance(message, Order) and message.number > self.order
        )

    def _pop_decision(self) -> StepDecision | None:
        """Remove and return the decision on this step."""
        found = self.links.pop_message(
            LEAD, lambda message: isinstance(message, StepDecision) and message.number == self.order
        )
        if not isinstance(found, StepDecision):
            return None
        self._is_decided = True
        self.has_diverged = found.verdict == "abandon"
        return found

    def report_broken(self, neighbour: int, problem: str, refused: bool = False) -> None:
        """Tell the lead that this machine cannot complete the step, and because of whom."""
        message = BrokenStep(
            epoch=self.roster.epoch,
            number=self.order,
            neighbour=neighbour,
            problem=problem,
            diverged=self.has_diverged,
            refused=refused,
        )
        self.links.send(LEAD, message)

    def _refuse(self, sender: int, error: ValueError) -> None:
        """End the step, and report its cause.

        The channel to another member stays: its end would look to the sender like this machine's
        fault. What the lead sent can be reported only by ending its channel.
        """
        super()._refuse(sender, error)
        if sender == LEAD:
            self.links.end_link(LEAD, f"its activations are of no use: {error}")
        else:
            self.report_broken(sender, self.problem, refused=True)

    def _diverge(self) -> None:
        super()._diverge()
        self.report_broken(self.links.number, self.problem)
        self.has_diverged = False  # the lead decides whether the round is dropped

    def await_decision(self) -> None:
        """Wait for the lead's word on a step that this machine has ended by itself."""
        links = self.links

        def is_over() -> bool:
            self._pop_decision()
            has_gone_on = links.has_message(LEAD) or LEAD not in links.connected()
            return self._is_decided or has_gone_on

        links.wait(is_over, LEAD_SECONDS, self._should_stop)

    def agree(self, losses: list[float], norms: Mapping[int, float]) -> tuple[float, float] | None:
        """Send this machine's norms, and wait for the lead's decision; None if it cancels.

        Raises:
            LeadLostError: the lead is gone; whether the step counted is not known.
        """
        if self.problem:  # it was found, and perhaps decided, while this machine computed
            return None
        links = self.links
        values = [norm if math.isfinite(norm) else None for _, norm in sorted(norms.items())]
        epoch, seconds = self.roster.epoch, self.work_seconds
        links.send(LEAD, Norms(epoch=epoch, number=self.order, norms=values, seconds=seconds))
        decision: list[StepDecision] = []

        def is_decided() -> bool:
            found = self._pop_decision()
            if found is not None:
                decision.append(found)
            return bool(decision)

        gone_since = None
        while not links.wait(is_decided, 1.0):
            now = time.monotonic()
            if links.is_recalled:
                self.problem = "the lead deals the blocks again"
                return None
            if self._is_overtaken() and not is_decided():
                self.problem = GONE_ON
                return None
            if LEAD in links.connected():
                gone_since = None
                continue
            gone_since = gone_since or now
            if now - gone_since > LEAD_SECONDS:
                raise LeadLostError(
                    f"the crew's lead {self.roster.name_of(LEAD)} has been gone for "
                    f"{LEAD_SECONDS:.0f} s: what this round has learnt is lost"
                )
        match decision[0].verdict:
            case "apply":
                return decision[0].loss, decision[0].norm
            case "abandon":
                return math.nan, math.nan
            case _:
                self.problem = "the lead has cancelled the step"
                return None
