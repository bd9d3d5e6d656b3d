"""Decentralised averaging: mix this machine's weights with those of its neighbours of the step.

A neighbour that vanishes costs a step of mixing, never the run: its share of the mixing matrix goes
to this machine's own weights, and once its channel has ended the roster is smaller. Machines may
join at any time: they fetch a neighbour's weights and step.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from barnraise.mixing.mesh_links import MeshLinks
from barnraise.mixing.payloads import (
    Payload,
    are_finite,
    check_weights,
    decode_weights,
    encode_weights,
)
from barnraise.mixing.step_inbox import roster_digest
from barnraise.peering.limits.repeated_warnings import RepeatedWarnings
from barnraise.planning.mixing_topology import EXPONENTIAL, Topology

log = logging.getLogger("barnraise.exchange")

SMOOTHING = 0.2  # of the usual step's length
LONELY_MIXINGS = 8  # mixings without any neighbour, after which this machine says so


@dataclass(frozen=True)
class Patience:
    """How long a machine waits for a neighbour that is late.

    Attributes:
        first_seconds: Before the usual step is known.
        usual_steps: From then on.
        least_seconds: The shortest wait.
        most_seconds: The longest wait.
    """

    first_seconds: float = 60.0
    usual_steps: float = 4.0
    least_seconds: float = 0.5
    most_seconds: float = 600.0


PATIENCE = Patience()


@dataclass(frozen=True)
class MixingSettings:
    """How machines mix; the same on all of them.

    Attributes:
        topology: who mixes with whom.
        bits: of a weight as sent.
        interval: steps between two mixings; a message may travel during so many steps.
    """

    topology: Topology = EXPONENTIAL
    bits: int = 32
    interval: int = 1


@dataclass
class MixingCounts:
    """What mixing has done so far.

    Attributes:
        mixings: steps in which weights were mixed.
        messages: neighbours' weights that arrived.
        missed: neighbours' weights that did not come.
        refused: neighbours' weights that no machine of this run can have.
        waited_seconds: time in which the training loop waited for neighbours.
    """

    mixings: int = 0
    messages: int = 0
    missed: int = 0
    refused: int = 0
    waited_seconds: float = 0.0


class NeighbourMixing:
    """Mix weights with neighbours.

    Attributes:
        step: the number of the current step, which all machines share.
        counts: what has happened.
        has_diverged: whether this machine's own weights were none that a run can have when the
            current step began.
    """

    def __init__(
        self,
        links: MeshLinks,
        settings: MixingSettings,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Mix over links that have been started.

        Args:
            links: to the other machines.
            settings: how to mix.
            should_stop: called several times a second while this machine waits for neighbours;
                ends the wait, and the step mixes nothing.
        """
        self.step = 0
        self.counts = MixingCounts()
        self._links = links
        self._settings = settings
        self._should_stop = should_stop
        self._repeats = RepeatedWarnings()
        self.has_diverged = False
        self._sent: Tensor | None = None  # float32 [n], as the neighbours decode it
        self._group: tuple[str, ...] = ()
        self._roster = b""
        self._machines = 1
        self._mixing_number = 0  # the step at which the current message was sent
        self._usual_seconds: float | None = None
        self._last_seconds: float | None = None  # of the last step, see `_end_step`
        self._started_at = 0.0
        self._was_skipped = False  # a neighbour of this step has gone on without this machine
        self._lonely_mixings = 0  # in a row, in which no neighbour took part
        self._lonely_without: tuple[str, ...] = ()  # keys of the last such mixing's neighbours

    def start_step(self, weights: Tensor) -> None:
        """Send this machine's weights to its neighbours of the step; do not wait."""
        if self._last_seconds is not None:
            self._record_duration(self._last_seconds)
        self._last_seconds = None
        self.has_diverged = False
        self._started_at = time.monotonic()
        if self.step % self._settings.interval and self._group:
            return
        roster = sorted([*self._links.neighbours(), self._links.key])
        snapshot = weights.clone()  # what is sent must not change while it travels
        payload = encode_weights(snapshot, self._settings.bits)
        try:
            sent = self._as_received(snapshot, payload)
            check_weights(sent)
        except ValueError as error:
            log.warning("this machine's weights are not sent in this step: %s", error)
            self._skip_step()
            return
        self._sent = sent
        self._roster = roster_digest(roster)
        self._machines = len(roster)
        if len(roster) == 1:
            self._lonely_mixings = 0  # nobody is there whose weights could be missed
        self._mixing_number = self.step // self._settings.interval
        self._group = self._choose_group(roster, self._mixing_number)

        def group_at(number: int) -> list[str]:
            return [key for key in self._choose_group(roster, number) if key != self._links.key]

        self._links.send_step(self._mixing_number, self._roster, payload, group_at)
        self._links.offer_state(self.step, encode_weights(snapshot, 32))

    def _as_received(self, weights: Tensor, payload: Payload) -> Tensor:
        """Return this machine's weights as its neighbours decode them, float32 [n].

        Raises:
            ValueError: They are not finite.
        """
        if self._settings.bits < 32:
            return decode_weights(payload, weights.numel(), self._settings.bits)
        if not are_finite(weights):
            raise ValueError("they hold values that are not finite")
        return weights

    def cancel_mixing(self) -> None:
        """Mix nothing until weights are sent again: the replica is no longer what was sent.

        What would be added is the way from the weights that were sent to the group's mean.
        """
        self._sent = None

    @torch.no_grad()
    def compute_change(self) -> Tensor | None:
        """Return what the group's weights change this machine's by, float32 [n].

        It is Σ_j W_ij Q(x_j) − Q(x_i), where Q(x_i) is what this machine sent. With weights that
        are sent in fewer bits, both sides use the same rounded values, so the mean over all
        machines does not change. With 32 bits all members add in one order and get the same bits.

        Returns:
            None in a step without mixing, and for a machine without neighbours.
        """
        sent = self._sent
        mean = self._end_step()
        return None if mean is None or sent is None else mean.sub_(sent)

    @property
    def steps_behind(self) -> int:
        """Return by how many steps the machine that is furthest ahead is ahead of this one."""
        return self._links.newest_step() * self._settings.interval - self.step

    @property
    def problem(self) -> str:
        """Return why this machine trains alone although it has neighbours, or ""."""
        if self._lonely_mixings < LONELY_MIXINGS:
            return ""
        names = ", ".join(key[:8] for key in self._lonely_without[:3])
        return (
            f"trains alone: its neighbours ({names}) have averaged no weights with it for "
            f"{LONELY_MIXINGS} mixings or more. They are paused or far slower, or two machines of "
            "the run have no link to each other: `barnraise status` lists each machine's peers; "
            "forward the port of one that others do not reach (--announce HOST:PORT), or stop it"
        )

    def _end_step(self) -> Tensor | None:
        """Wait for the group's weights and go to the next step.

        The step lasts from its start to here, and to the arrival of what was awaited. Pauses and
        evaluations lie between two steps, and a wait in vain says nothing of the usual step.

        Returns:
            The group's mean, float32 [n]; None where this step mixes nothing.
        """
        self._last_seconds = time.monotonic() - self._started_at
        interval = self._settings.interval
        is_last_step = self.step % interval == interval - 1
        mean = None
        if is_last_step and self._sent is not None and len(self._group) > 1:
            mean = self._average_group(self._sent)
        self._go_to_next_step()
        return mean

    def _average_group(self, sent: Tensor) -> Tensor | None:
        """Wait for the group's weights and return their mean, float32 [n].

        Their size is bounded, so the mean is finite.
        """
        arrived = self._await_neighbours(sent)
        if arrived is None:
            return None
        first, *others = (arrived.get(key, sent) for key in self._group)
        mean = first.clone()
        for weights in others:
            mean += weights
        mean.div_(len(self._group))
        self._record_company(bool(arrived))
        self.counts.messages += len(arrived)
        self.counts.missed += len(self._group) - 1 - len(arrived)
        self.counts.mixings += 1
        return mean

    def _await_neighbours(self, sent: Tensor) -> dict[str, Tensor] | None:
        """Wait for each member of the group, as long as it can still be expected.

        Args:
            sent: what this machine sent, float32 [n].

        Returns:
            The weights that arrived, by key; None if the wait was stopped.
        """
        others = [key for key in self._group if key != self._links.key]
        step, roster = self._mixing_number, self._roster
        started = time.monotonic()
        has_all = self._links.wait_for(
            lambda inbox: inbox.has_all(others, step, roster), self.patience, self._should_stop
        )
        waited = time.monotonic() - started
        self.counts.waited_seconds += waited
        if has_all and self._last_seconds is not None:
            self._last_seconds += waited
        if not has_all and self._should_stop():
            return None
        arrivals = self._links.pop_arrivals(others, step, roster)
        self._was_skipped = arrivals.has_gone_on
        for key in arrivals.late:
            log.info("%s is late: going on without it until it catches up", key[:8])
        weights: dict[str, Tensor] = {}
        for key, payload in arrivals.payloads.items():
            try:
                received = decode_weights(payload, sent.numel(), self._settings.bits)
                check_weights(received, sent)
                weights[key] = received
            except ValueError as error:
                self.counts.refused += 1
                self._repeats.warn(f"{key} {error}", "ignored weights of %s: %s", key[:8], error)
        return weights

    def _record_company(self, has_company: bool) -> None:
        """Record whether a neighbour took part in a mixing; log when that changes for long."""
        if has_company:
            if self.problem:
                log.info("this machine averages weights with its neighbours again")
            self._lonely_mixings = 0
            return
        self._lonely_mixings += 1
        self._lonely_without = tuple(key for key in self._group if key != self._links.key)
        if self._lonely_mixings == LONELY_MIXINGS:
            log.warning("this machine %s", self.problem)

    def _skip_step(self) -> None:
        """Send nobody weights, with a roster of this machine alone: nobody waits for them."""
        self.has_diverged = True
        self._sent = None
        self._group = (self._links.key,)
        self._roster = roster_digest(self._group)
        self._mixing_number = self.step // self._settings.interval
        self._links.send_step(self._mixing_number, self._roster, b"", lambda _: ())

    def _choose_group(self, roster: list[str], number: int) -> tuple[str, ...]:
        """Return the keys that this machine mixes with in a mixing, its own included."""
        place = roster.index(self._links.key)
        members = self._settings.topology.group_at(len(roster), place, number)
        return tuple(roster[member] for member in members)

    def _go_to_next_step(self) -> None:
        """Count the step; a machine that was held up continues where its neighbours are.

        Machines that only wait for the neighbours of each step are apart by less than their number.
        One that a neighbour has not waited for would stay behind for ever at equal speed, and mix
        with nobody.
        """
        self.step += 1
        behind = self.steps_behind
        is_far_behind = behind > max(2, self._machines) * self._settings.interval
        if is_far_behind or (self._was_skipped and behind > 0):
            self.step += behind
        self._was_skipped = False

    def _record_duration(self, seconds: float) -> None:
        usual = self._usual_seconds
        self._usual_seconds = seconds if usual is None else usual + SMOOTHING * (seconds - usual)

    @property
    def patience(self) -> float:
        """Return the seconds to wait for a neighbour that is late."""
        if self._usual_seconds is None:
            return PATIENCE.first_seconds
        patience = PATIENCE.usual_steps * self._settings.interval * self._usual_seconds
        return min(PATIENCE.most_seconds, max(PATIENCE.least_seconds, patience))
