"""Simulate machines that never wait and exchange integer updates that arrive late.

Codec, int32 anchor, the error feedback's arithmetic and the schedule are the worker's own. The
clock is virtual. Its unit is a step of a machine of average speed, so that all machines together
take `replicas` steps in one unit, and a round lasts H. A machine knows only what it could know: the
tokens of the updates it has, the speeds that the others announce, the time.

A round has publications. Each ends the round of some fragments, which restart from the anchor; the
other fragments go on. Without streaming there is one publication, at the round's end. With
streaming each fragment has its own, at the time when the uplink has sent those before it, and it is
late by its own bytes alone.
"""

import heapq
import math
import random
from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from study_baselines import FINAL_SEQUENCES, LossCurve, make_result
from study_case import Case
from study_model import (
    FRAGMENTS,
    SIZE,
    SLICES,
    STEP_TOKENS,
    WARMUP_STEPS,
    Replica,
    initial_units,
    rate_scale,
    sample_batch,
    zeros,
)
from torch import Tensor

from barnraise.exchange.weights.delay_compensation import MAX_IN_FLIGHT, MAX_RELATIVE_SIZE
from barnraise.ledger.codec import encode
from barnraise.swap.outer_optimizer import accumulate_feedback
from barnraise.swap.precision import units_to_float

RAMP_ROUNDS = 3  # rounds in which a late joiner reaches its weight
TIME_EPSILON = 1e-6  # rounds, so that rounding does not move an event into the next round
CHECK_EVERY = 50  # steps between two checks for divergence
# The anchors whose mean is evaluated, too: so many, evenly over the last part of the tokens.
MEAN_ANCHORS = 8
MEAN_PART = 0.05


@dataclass(frozen=True)
class Publication:
    """One of a round's publications."""

    number: int
    when: float  # 0…1 of the round
    share: float  # of the model's bytes
    begin: int  # of the flat buffer
    end: int
    fragments: tuple[int, ...]

    @property
    def part(self) -> slice:
        """The fragments' slice of the flat buffer."""
        return slice(self.begin, self.end)


def make_publications(case: Case) -> list[Publication]:
    """Return a round's publications."""
    if not case.streamed:
        return [Publication(0, 1.0, 1.0, 0, SIZE, tuple(range(len(FRAGMENTS))))]
    return [
        Publication(
            number=i,
            when=piece.stop / SIZE,
            share=(piece.stop - piece.start) / SIZE,
            begin=piece.start,
            end=piece.stop,
            fragments=(i,),
        )
        for i, piece in enumerate(SLICES)
    ]


@dataclass(frozen=True)
class SentUpdate:
    """An update in flight."""

    author: int
    publication: Publication
    window: int  # the round, by its author's clock, that it ends
    units: Tensor  # what it decodes to, int32 [the publication's part]
    tokens: int


@dataclass(frozen=True)
class MissingUpdate:
    """An update that a machine can expect and has not received."""

    author: int
    window: int
    ratio: float  # its size over that of one of the machine's own updates


class Machine:
    """One volunteer's machine: replica, anchor, outer momentum, error feedback."""

    def __init__(self, case: Case, number: int, speed: float, joins_at: float) -> None:
        """Create a machine with the initial anchor.

        Args:
            case: the training's settings.
            number: the machine's.
            speed: steps per unit of time.
            joins_at: the time at which it starts.
        """
        self.case = case
        self.number = number
        self.speed = speed
        self.joins_at = joins_at
        self.replica = Replica(case)
        self.anchor = initial_units(case.seed)
        self.momentum = zeros()
        self.feedback = zeros(torch.int32)
        self.start = units_to_float(
            self.anchor
        )  # the replica at the start of each fragment's round
        self.replica.flat.copy_(self.start)
        self.tokens_received: dict[int, int] = defaultdict(int)  # of each author, in the anchor
        # By (author, publication): the update that arrived last, and the window that it ended.
        self.last_updates: dict[tuple[int, int], Tensor] = {}
        self.last_windows: dict[tuple[int, int], int] = {}
        # By (author, publication, window): the prediction of a missing update.
        self.predictions: dict[tuple[int, int, int], Tensor] = {}
        # By publication: (window, update) of this machine's last updates.
        self.own_updates: dict[int, deque[tuple[int, Tensor]]] = defaultdict(
            lambda: deque(maxlen=MAX_IN_FLIGHT + 1)
        )
        self.published_at: dict[int, int] = defaultdict(int)  # by publication: the step
        self.steps = 0
        self.steps_since_publication = 0
        self.rounds = 0

    # ---- during a round -----------------------------------------------------------------------

    def step(self, share: float, budget: int, tokens_in_flight: float) -> None:
        """Take one step.

        Args:
            share: this machine's share of all tokens per second.
            budget: the training's tokens.
            tokens_in_flight: tokens of updates that are thought to be on their way here.
        """
        own_tokens = self.steps_since_publication * STEP_TOKENS
        tokens: float = sum(self.tokens_received.values()) + own_tokens
        if self.case.clock == "expected":
            # The others train meanwhile, each at its rate.
            tokens += tokens_in_flight + own_tokens * (1 / share - 1)
        self.replica.compute_gradient(sample_batch(self.case.seed, self.number, self.steps))
        self.replica.step(self.case.rate * rate_scale(tokens, budget))
        self.steps += 1
        self.steps_since_publication += 1

    def receive(self, sent: SentUpdate) -> None:
        """Add an update to the anchor, and correct the replica by what was not predicted."""
        key = (sent.author, sent.publication.number)
        part = sent.publication.part
        self.anchor[part] += sent.units
        self.tokens_received[sent.author] += sent.tokens
        update = units_to_float(sent.units)
        self.last_updates[key] = update
        self.last_windows[key] = sent.window
        prediction = self.predictions.pop((*key, sent.window), None)
        if self.case.fold == "now":
            correction = update if prediction is None else update - prediction
            self.replica.flat[part] += correction
            self.start[part] += correction

    # ---- a publication ------------------------------------------------------------------------

    def end_round(
        self, publication: Publication, window: int, share: float, progress: float
    ) -> tuple[SentUpdate, int]:
        """End the round of a publication's fragments, by the arithmetic of `Engine.end_round`.

        Args:
            publication: which fragments.
            window: the round that ends.
            share: this machine's share of all tokens per second.
            progress: 0…1 of the training.

        Returns:
            The update, and its payloads' bytes.
        """
        case, part = self.case, publication.part
        last_momentum = case.momentum if case.momentum_end is None else case.momentum_end
        mu = case.momentum + (last_momentum - case.momentum) * progress
        weight = (share if case.weights == "rate" else 1 / case.replicas) * self.ramp
        delta = (self.start[part] - self.replica.flat[part]).mul_(weight)
        momentum, feedback = self.momentum[part], self.feedback[part]
        if self.rounds < case.plain_rounds:
            published_share = min(1.0, case.outer_rate * (1 + mu))
            momentum.copy_(delta * (published_share / case.outer_rate))
            step = delta * published_share
        else:
            if case.plain_rounds and self.rounds == case.plain_rounds:
                momentum.zero_()
            momentum.mul_(mu).add_(delta)
            step = (delta + mu * momentum).mul_(case.outer_rate)
        accumulate_feedback(feedback, step, case.decay)
        units = torch.empty_like(feedback)
        size = 0
        for i in publication.fragments:
            piece = slice(SLICES[i].start - part.start, SLICES[i].stop - part.start)
            payload, decoded = encode(-feedback[piece].cpu(), case.form)
            units[piece] = decoded
            size += len(payload)
        feedback += units
        tokens = self.steps_since_publication * STEP_TOKENS
        sent = SentUpdate(self.number, publication, window, units, tokens)
        self.anchor[part] += units
        self.tokens_received[self.number] += tokens
        self.own_updates[publication.number].append((window, units_to_float(units)))
        self.published_at[publication.number] = self.steps
        self.steps_since_publication = 0
        if publication.when == 1.0:
            self.rounds += 1
        return sent, size

    @property
    def ramp(self) -> float:
        """The factor of a late joiner's weight."""
        return min(1.0, (self.rounds + 1) / RAMP_ROUNDS) if self.joins_at else 1.0

    def start_round(self, publication: Publication, missing: list[MissingUpdate]) -> None:
        """Restart a publication's fragments from the anchor plus what it lacks.

        That is this machine's residual, and predictions of what is missing.
        """
        units = self.anchor[publication.part]
        if self.case.residual_in_replica:
            units = units - self.feedback[publication.part]
        start = units_to_float(units)
        self.predictions = {
            key: prediction
            for key, prediction in self.predictions.items()
            if key[1] != publication.number
        }
        if self.case.guess != "none":
            for update in missing:
                prediction = self.predict_update(publication, update)
                key = (update.author, publication.number, update.window)
                self.predictions[key] = prediction
                start += prediction
        self.start[publication.part] = start
        self.replica.flat[publication.part] = start

    def predict_update(self, publication: Publication, missing: MissingUpdate) -> Tensor:
        """Predict an update that has not arrived, by the case's method."""
        case = self.case
        last = self.last_updates.get((missing.author, publication.number))
        if case.guess == "last" and last is not None:
            return last * case.trust
        if case.guess == "momentum":  # A machine that goes on as before has (1 − μ)m as its Δ.
            factor = -case.outer_rate * missing.ratio * case.trust
            return self.momentum[publication.part] * factor
        own = self.own_updates[publication.number]
        candidates = own if case.windows else [own[-1]]
        _, nearest = min(candidates, key=lambda entry: abs(entry[0] - missing.window))
        return nearest * (missing.ratio * case.trust)


# Time, serial number, kind ("step", "join" or "arrive"), machine, and the update that arrives.
SimulationEvent = tuple[float, int, str, int, SentUpdate | None]


class Simulation:
    """All machines, the clock, and the updates in flight."""

    def __init__(self, case: Case) -> None:
        """Create the machines and schedule their first steps."""
        self.case = case
        self.random = random.Random(case.seed)
        speeds = case.speeds or (1.0,) * case.replicas
        assert len(speeds) == case.replicas
        mean_speed = sum(speeds) / len(speeds)
        self.length = case.tokens / (case.replicas * STEP_TOKENS)  # of the training, on the clock
        joins = case.joins or (0.0,) * case.replicas
        self.machines = [
            Machine(case, i, speed / mean_speed, joins[i] * self.length)
            for i, speed in enumerate(speeds)
        ]
        self.curve = LossCurve(case.tokens)
        self.bytes_sent = 0
        self.steps = 0
        self.updates = 0
        self._anchor_sum = zeros()
        self._anchors_summed = 0
        self._serial = count()
        self._queue: list[SimulationEvent] = []
        self.publications = make_publications(case)
        # Without a common clock each machine's rounds begin at a random step.
        self.phases = [0.0 if case.windows else self.random.random() * case.steps for _ in speeds]
        for i, machine in enumerate(self.machines):
            first_step = machine.joins_at + self.random.random() * 0.01 + 1 / machine.speed
            self._schedule(first_step, "step", i)
            if machine.joins_at:
                self._schedule(machine.joins_at, "join", i)

    def _schedule(
        self, time: float, kind: str, machine: int, sent: SentUpdate | None = None
    ) -> None:
        heapq.heappush(self._queue, (time, next(self._serial), kind, machine, sent))

    # ---- what a machine can know --------------------------------------------------------------

    def rate_share(self, machine: Machine, now: float) -> float:
        """Return a machine's share of all tokens per second."""
        return machine.speed / sum(m.speed for m in self.machines if m.joins_at <= now)

    def window(self, machine: Machine, now: float) -> int:
        """Return how many rounds have ended, by the common clock or the machine's own."""
        if self.case.windows:
            return int(now / self.case.steps + TIME_EPSILON)
        return machine.rounds

    def missing_updates(
        self, machine: Machine, publication: Publication, window: int, now: float
    ) -> list[MissingUpdate]:
        """Return the others' updates that must be in flight by the clock."""
        case = self.case
        missing: list[MissingUpdate] = []
        for other in self.machines:
            if other is machine or other.joins_at > now or not case.delay:
                continue
            speed_ratio = other.speed / machine.speed
            weight_ratio = speed_ratio if case.weights == "rate" else 1.0
            round_ratio = speed_ratio if case.windows else 1.0
            ratio = min(MAX_RELATIVE_SIZE, weight_ratio * round_ratio)
            key = (other.number, publication.number)
            if not case.windows:
                next_window = machine.last_windows.get(key, 0) + 1
                missing.append(MissingUpdate(other.number, next_window, ratio))
                continue
            first = self.window(other, other.joins_at)
            last = machine.last_windows.get(key, first)
            since = max(last, window - MAX_IN_FLIGHT, first)
            missing += [MissingUpdate(other.number, w, ratio) for w in range(since + 1, window + 1)]
        return missing

    def tokens_in_flight(self, machine: Machine, now: float) -> float:
        """Return the tokens that others have trained since their last update here, at their rates.

        What they train during this machine's round is counted by its share instead.
        """
        if self.case.clock != "expected":
            return 0.0
        round_start = now - machine.steps_since_publication / machine.speed
        tokens = 0.0
        for other in self.machines:
            if other is not machine and other.joins_at <= now:
                trained = (round_start - other.joins_at) * other.speed * STEP_TOKENS
                tokens += max(0.0, trained - machine.tokens_received[other.number])
        return tokens

    def ended_publications(self, machine: Machine, now: float) -> list[tuple[Publication, int]]:
        """Return each publication that ended with a machine's last step, and its last round."""
        if self.case.windows:
            before, after = now - 1 / machine.speed, now
        else:
            steps = machine.steps + self.phases[machine.number]
            before, after = steps - 1, steps
        before = before / self.case.steps + TIME_EPSILON
        after = after / self.case.steps + TIME_EPSILON
        ended: dict[Publication, int] = {}
        for round_number in range(int(before) + 1, math.ceil(after) + 1):
            for publication in self.publications:
                if before < round_number - 1 + publication.when <= after:
                    ended[publication] = round_number
        return list(ended.items())

    # ---- the clock ----------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train all tokens, and return the result."""
        goal = self.case.tokens // STEP_TOKENS
        while self.steps < goal:
            now, _, kind, i, sent = heapq.heappop(self._queue)
            machine = self.machines[i]
            if kind == "arrive":
                assert sent is not None
                if machine.joins_at <= now:
                    machine.receive(sent)
            elif kind == "join":
                self._join(machine, now)
            else:
                self._step(machine, now)
                is_checked = self.steps % CHECK_EVERY == 0
                if is_checked and not torch.isfinite(machine.replica.flat).all():
                    return self._summarise_result(float("nan"))
        self._deliver_everything()
        self._add_anchor()
        mean_loss = self.machines[0].replica.validate(
            self._anchor_sum / self._anchors_summed, FINAL_SEQUENCES
        )
        loss = self._validate(FINAL_SEQUENCES)
        return self._summarise_result(loss, updates=self.updates, mean_loss=round(mean_loss, 5))

    def _step(self, machine: Machine, now: float) -> None:
        share = self.rate_share(machine, now)
        machine.step(share, self.case.tokens, self.tokens_in_flight(machine, now))
        self.steps += 1
        for publication, window in self.ended_publications(machine, now):
            self._publish(machine, publication, window, now)
        self._schedule(now + 1 / machine.speed, "step", machine.number)
        self.curve.record(self.steps * STEP_TOKENS, self._validate)
        summed_from = 1 - MEAN_PART * (1 - self._anchors_summed / (MEAN_ANCHORS - 1))
        if self._anchors_summed < MEAN_ANCHORS - 1 and self.progress >= summed_from:
            self._add_anchor()

    def _add_anchor(self) -> None:
        """Add the first machine's anchor to those whose mean is evaluated."""
        self._anchor_sum += units_to_float(self.machines[0].anchor)
        self._anchors_summed += 1

    def _publish(self, machine: Machine, publication: Publication, window: int, now: float) -> None:
        sent = self._end_round(machine, publication, window, now)
        for other in range(len(self.machines)):
            if other != machine.number:
                jitter = 0.75 + 0.5 * self.random.random()
                delay = self.case.delay * publication.share * self.case.steps * jitter
                self._schedule(now + delay, "arrive", other, sent)
        # Without delay, what others publish at this very moment arrives during the first step.
        missing = self.missing_updates(machine, publication, window, now) if self.case.delay else []
        machine.start_round(publication, missing)

    def _end_round(
        self, machine: Machine, publication: Publication, window: int, now: float
    ) -> SentUpdate:
        share = self.rate_share(machine, now)
        sent, size = machine.end_round(publication, window, share, self.progress)
        self.bytes_sent += size
        self.updates += 1
        return sent

    @property
    def progress(self) -> float:
        """How much of the training is done, 0…1."""
        return min(1.0, self.steps * STEP_TOKENS / self.case.tokens)

    def _join(self, machine: Machine, now: float) -> None:
        """Start a machine with the first one's anchor.

        Updates in flight to the first machine arrive at this one too.
        """
        source = self.machines[0]
        machine.anchor = source.anchor.clone()
        machine.tokens_received = source.tokens_received.copy()
        machine.last_windows = source.last_windows.copy()
        for publication in self.publications:
            key = (source.number, publication.number)
            machine.last_windows[key] = self.window(source, now)
        machine.last_updates = dict(source.last_updates)
        machine.replica.warmup_steps_left = WARMUP_STEPS
        self._queue = [event for event in self._queue if event[2:4] != ("arrive", machine.number)]
        heapq.heapify(self._queue)
        for time, _, kind, i, sent in list(self._queue):
            if kind == "arrive" and i == source.number:
                self._schedule(time, "arrive", machine.number, sent)
        for publication in self.publications:
            machine.start_round(publication, [])

    def _validate(self, sequences: int) -> float:
        machine = self.machines[0]
        return machine.replica.validate(units_to_float(machine.anchor), sequences)

    def _deliver_everything(self) -> None:
        """Publish everybody's last round, deliver all updates, and compare all anchors' bits."""
        in_flight = [(i, sent) for _, _, kind, i, sent in self._queue if kind == "arrive"]
        for machine in self.machines:
            unpublished = [
                publication
                for publication in self.publications
                if machine.published_at[publication.number] < machine.steps
            ]
            for publication in unpublished:
                sent = self._end_round(machine, publication, 0, self.length)
                others = [i for i in range(len(self.machines)) if i != machine.number]
                in_flight += [(i, sent) for i in others]
        for i, sent in in_flight:
            assert sent is not None
            self.machines[i].receive(sent)
        first = self.machines[0].anchor
        agree = all(torch.equal(first, machine.anchor) for machine in self.machines)
        assert agree, "machines with the same updates differ"

    def _summarise_result(self, loss: float, **more: Any) -> dict[str, Any]:
        tokens = self.steps * STEP_TOKENS
        return make_result(self.curve, loss, bytes=self.bytes_sent, tokens=tokens, **more)


def train_ours(case: Case) -> dict[str, Any]:
    """Train a case by this project's exchange."""
    return Simulation(case).run()
