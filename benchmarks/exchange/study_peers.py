"""Ours: machines that take single steps on a virtual clock, never wait, and trade integer updates that come late.

Codec, int32 anchor, the error feedback's arithmetic and the schedule are the worker's own. The clock's unit is a step
of a machine of average speed, so that all machines together take `replicas` steps in one, and a round lasts H.
What a machine knows is what it could: the tokens of updates it has, the speeds that the others announce, the time.

A round has turns. In each some fragments are said, and begin anew from the anchor; the others go on. Not streamed there
is one, at the round's end. Streamed, each fragment has its own: it ends where the line has sent those before it, and is
late by its own bytes alone.
"""

import heapq
import math
import random
from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import count

import torch
from study_baselines import FINAL, Curve, finished
from study_case import Case
from study_model import (
    FRAGMENTS,
    PIECES,
    SIZE,
    STEP_TOKENS,
    Replica,
    batch,
    initial_units,
    nothing,
    rate_scale,
)
from torch import Tensor

from barnraise.exchange.compression.codec import encode
from barnraise.exchange.pacing.delay_compensation import MAX_IN_FLIGHT, MAX_RELATIVE_SIZE
from barnraise.swap.outer_optimizer import accumulate_feedback
from barnraise.swap.precision import units_to_float

RAMP = 3  # rounds over which a late joiner comes to its weight


@dataclass(frozen=True)
class Turn:
    """Of each round: when, 0…1, the share of the model's bytes, and whose they are."""

    number: int
    when: float
    share: float
    begin: int
    end: int  # …of SIZE
    fragments: tuple[int, ...]

    @property
    def part(self) -> slice:
        return slice(self.begin, self.end)


def turns(case: Case) -> list[Turn]:
    if not case.streamed:
        return [Turn(0, 1.0, 1.0, 0, SIZE, tuple(range(len(FRAGMENTS))))]
    places = [(piece.start, piece.stop) for piece in PIECES]
    return [
        Turn(i, end / SIZE, (end - begin) / SIZE, begin, end, (i,))
        for i, (begin, end) in enumerate(places)
    ]


@dataclass(frozen=True)
class Sent:
    """An update on its way: the int32 [of its turn's part] it decodes to."""

    author: int
    turn: Turn
    window: int  # the round of its author's clock that it ends
    units: Tensor
    tokens: int


class Machine:
    """One volunteer's: replica, anchor, momentum, error feedback."""

    def __init__(self, case: Case, number: int, speed: float, begins: float):
        self.case, self.number, self.speed, self.begins = case, number, speed, begins
        self.replica = Replica(case.optimizer)
        self.anchor = initial_units(case.seed)
        self.momentum, self.feedback = nothing(), nothing(torch.int32)
        self.start = units_to_float(self.anchor)
        self.replica.flat.copy_(self.start)
        self.held: dict[int, int] = defaultdict(int)  # tokens of each author in the anchor
        self.last: dict[tuple[int, int], Tensor] = {}  # (author, turn): the last update that came
        self.seen: dict[tuple[int, int], int] = {}  # the window that it ended
        self.guesses: dict[tuple[int, int, int], Tensor] = {}  # by author, turn and window
        self.own: dict[int, deque[tuple[int, Tensor]]] = defaultdict(
            lambda: deque(maxlen=MAX_IN_FLIGHT + 1)
        )  # by turn
        self.said: dict[int, int] = defaultdict(int)  # turn → the steps when it last ended
        self.data_step = self.round_steps = self.rounds = 0  # `round_steps`: since the last turn

    # ---- between the rounds' ends

    def step(self, share: float, budget: int, owed: float) -> None:
        """`share`: of all tokens a second, this machine's; `owed`: tokens thought to be under way to it."""
        mine = self.round_steps * STEP_TOKENS
        tokens = sum(self.held.values()) + mine
        if self.case.clock == "expected":
            tokens += owed + mine * (1 / share - 1)  # the others go on meanwhile, each at its rate
        self.replica.learn(batch(self.case.seed, self.number, self.data_step))
        self.replica.step(self.case.rate * rate_scale(tokens, budget))
        self.data_step, self.round_steps = self.data_step + 1, self.round_steps + 1

    def receive(self, sent: Sent) -> None:
        turn, part = (sent.author, sent.turn.number), sent.turn.part
        self.anchor[part] += sent.units
        self.held[sent.author] += sent.tokens
        update = units_to_float(sent.units)
        self.last[turn], self.seen[turn] = update, sent.window
        guess = self.guesses.pop((*turn, sent.window), None)
        if self.case.fold == "now":
            moved = update if guess is None else update - guess
            self.replica.flat[part] += moved
            self.start[part] += moved

    # ---- a turn's end

    def harvest(self, turn: Turn, window: int, share: float, done: float) -> tuple[Sent, int]:
        """Ends the turn: the update and its payloads' bytes. `done`: of the training, 0…1. As `Engine.harvest`."""
        case, part = self.case, turn.part
        end = case.momentum if case.momentum_end is None else case.momentum_end
        mu = case.momentum + (end - case.momentum) * done
        weight = (share if case.weights == "rate" else 1 / case.replicas) * self.ramp
        delta = (self.start[part] - self.replica.flat[part]).mul_(weight)
        momentum, feedback = self.momentum[part], self.feedback[part]
        momentum.mul_(mu).add_(delta)
        accumulate_feedback(feedback, (delta + mu * momentum).mul_(case.outer_rate), case.decay)
        units, size = torch.empty_like(feedback), 0
        for i in turn.fragments:
            piece = slice(PIECES[i].start - part.start, PIECES[i].stop - part.start)
            payload, said = encode(-feedback[piece].cpu(), case.form)
            units[piece] = said
            size += len(payload)
        feedback += units
        sent = Sent(self.number, turn, window, units, self.round_steps * STEP_TOKENS)
        self.anchor[part] += units
        self.held[self.number] += sent.tokens
        self.own[turn.number].append((window, units_to_float(units)))
        self.said[turn.number] = self.data_step
        self.round_steps, self.rounds = 0, self.rounds + (turn.when == 1.0)
        return sent, size

    @property
    def ramp(self) -> float:
        return min(1.0, (self.rounds + 1) / RAMP) if self.begins else 1.0

    def begin(self, turn: Turn, missing: list[tuple[int, int, float]]) -> None:
        """The turn's part anew: from the anchor and, for each (author, window, ratio) that is missing, a guess."""
        start = units_to_float(self.anchor[turn.part])
        self.guesses = {key: guess for key, guess in self.guesses.items() if key[1] != turn.number}
        if self.case.guess != "none":
            for author, window, ratio in missing:
                self.guesses[author, turn.number, window] = guess = self.guess(
                    author, turn, window, ratio
                )
                start += guess
        self.start[turn.part] = start
        self.replica.flat[turn.part] = start

    def guess(self, author: int, turn: Turn, window: int, ratio: float) -> Tensor:
        """What `author`, whose updates are `ratio` times this machine's, may have sent at the turn of `window`."""
        if self.case.guess == "last" and (author, turn.number) in self.last:
            return self.last[author, turn.number] * self.case.trust
        if self.case.guess == "momentum":  # a steady one's next: (1 − μ)m is its Δ
            return self.momentum[turn.part] * (-self.case.outer_rate * ratio * self.case.trust)
        own = self.own[turn.number]
        same = own if self.case.windows else [own[-1]]
        near = min(same, key=lambda entry: abs(entry[0] - window))
        return near[1] * (ratio * self.case.trust)


class World:
    """All machines, the clock, and what is under way."""

    def __init__(self, case: Case):
        self.case, dice = case, random.Random(case.seed)
        speeds = case.speeds or (1.0,) * case.replicas
        assert len(speeds) == case.replicas
        mean = sum(speeds) / len(speeds)
        self.length = case.tokens / (
            case.replicas * STEP_TOKENS
        )  # of the whole training, on the clock
        joins = case.joins or (0.0,) * case.replicas
        self.machines = [
            Machine(case, i, speed / mean, joins[i] * self.length) for i, speed in enumerate(speeds)
        ]
        self.curve, self.bytes, self.steps, self.updates = Curve(case.tokens), 0, 0, 0
        self.dice, self._serial, self._queue = dice, count(), []
        self.turns = turns(case)
        self.phase = [0.0 if case.windows else dice.random() * case.steps for _ in speeds]
        for i, machine in enumerate(self.machines):
            self._at(machine.begins + dice.random() * 0.01 + 1 / machine.speed, "step", i)
            if machine.begins:
                self._at(machine.begins, "join", i)

    def _at(self, time: float, kind: str, i: int, sent: Sent | None = None) -> None:
        heapq.heappush(self._queue, (time, next(self._serial), kind, i, sent))

    # ---- what a machine can know

    def share(self, machine: Machine, now: float) -> float:
        return machine.speed / sum(m.speed for m in self.machines if m.begins <= now)

    def window(self, machine: Machine, now: float) -> int:
        """How many rounds have ended by now: by the one clock, or a machine's own."""
        if self.case.windows:
            return int(now / self.case.steps + 1e-6)
        return machine.rounds

    def missing(
        self, mine: Machine, turn: Turn, window: int, now: float
    ) -> list[tuple[int, int, float]]:
        """(author, window, its size over one of mine) of what mine has not and others have sent in this turn, as far as
        the clock tells."""
        case, found = self.case, []
        for other in self.machines:
            if other is mine or other.begins > now or not case.delay:
                continue
            ratio = other.speed / mine.speed
            ratio = min(
                MAX_RELATIVE_SIZE,
                (ratio if case.weights == "rate" else 1.0) * (ratio if case.windows else 1.0),
            )
            if case.windows:
                first = self.window(other, other.begins)
                since = max(
                    mine.seen.get((other.number, turn.number), first), window - MAX_IN_FLIGHT, first
                )
                found += [(other.number, w, ratio) for w in range(since + 1, window + 1)]
            else:
                found.append(
                    (other.number, mine.seen.get((other.number, turn.number), 0) + 1, ratio)
                )
        return found

    # ---- the clock

    def run(self) -> dict:
        budget = self.case.tokens
        goal = budget // STEP_TOKENS
        while self.steps < goal:
            now, _, kind, i, sent = heapq.heappop(self._queue)
            machine = self.machines[i]
            if kind == "arrive":
                if machine.begins <= now:
                    machine.receive(sent)
                continue
            if kind == "join":
                self._join(machine, now)
                continue
            share = self.share(machine, now)
            machine.step(share, budget, self._owed(machine, now))
            self.steps += 1
            for turn, window in self._ended(machine, now):
                self._trade(machine, turn, window, now)
            self._at(now + 1 / machine.speed, "step", i)
            self.curve.note(self.steps * STEP_TOKENS, self._validate)
            if self.steps % 50 == 0 and not torch.isfinite(machine.replica.flat).all():
                return finished(
                    self.curve, float("nan"), bytes=self.bytes, tokens=self.steps * STEP_TOKENS
                )
        return self._settle()

    def _owed(self, machine: Machine, now: float) -> float:
        """Tokens of updates that the machine thinks under way to it: since each other's last, at its rate."""
        if machine.case.clock != "expected":
            return 0.0
        began = (
            now - machine.round_steps / machine.speed
        )  # what went on since is counted by the share
        owed = 0.0
        for other in self.machines:
            if other is not machine and other.begins <= now:
                owed += max(
                    0.0,
                    (began - other.begins) * other.speed * STEP_TOKENS - machine.held[other.number],
                )
        return owed

    def _ended(self, machine: Machine, now: float) -> list[tuple[Turn, int]]:
        """Each turn that ended with this step, and its (last) round: by the one clock, or by the machine's steps."""
        if self.case.windows:
            before, after = (at / self.case.steps + 1e-6 for at in (now - 1 / machine.speed, now))
        else:
            steps = machine.data_step + self.phase[machine.number]
            before, after = (at / self.case.steps + 1e-6 for at in (steps - 1, steps))
        rounds = range(int(before) + 1, math.ceil(after) + 1)
        ended = {
            turn: r for r in rounds for turn in self.turns if before < r - 1 + turn.when <= after
        }
        return list(ended.items())

    def _trade(self, machine: Machine, turn: Turn, window: int, now: float) -> None:
        sent, size = machine.harvest(turn, window, self.share(machine, now), self.done)
        self.bytes, self.updates = self.bytes + size, self.updates + 1
        for other in range(len(self.machines)):
            if other != machine.number:
                late = (
                    self.case.delay
                    * turn.share
                    * self.case.steps
                    * (0.75 + 0.5 * self.dice.random())
                )
                self._at(now + late, "arrive", other, sent)
        if self.case.delay:
            machine.begin(turn, self.missing(machine, turn, window, now))
        else:  # what others send at this very moment is not there yet; it comes during the first step
            machine.begin(turn, [])

    @property
    def done(self) -> float:
        return min(1.0, self.steps * STEP_TOKENS / self.case.tokens)

    def _join(self, machine: Machine, now: float) -> None:
        """From the first machine's anchor as it is; its updates that are under way come to the joiner from others."""
        source = self.machines[0]
        machine.anchor = source.anchor.clone()
        machine.held, machine.seen = source.held.copy(), source.seen.copy()
        machine.seen |= {
            (source.number, turn.number): self.window(source, now) for turn in self.turns
        }
        machine.last, machine.replica.warming = dict(source.last), 20
        self._queue = [event for event in self._queue if event[2:4] != ("arrive", machine.number)]
        heapq.heapify(self._queue)
        for at, _, kind, i, sent in list(self._queue):
            if kind == "arrive" and i == source.number:
                self._at(at, "arrive", machine.number, sent)
        for turn in self.turns:
            machine.begin(turn, [])

    def _validate(self, sequences: int) -> float:
        machine = self.machines[0]
        return machine.replica.validate(units_to_float(machine.anchor), sequences)

    def _settle(self) -> dict:
        """Everybody's last round and all that is under way: then all anchors are one, bit for bit."""
        under_way = [(i, sent) for _, _, kind, i, sent in self._queue if kind == "arrive"]
        for machine in self.machines:
            for turn in (
                turn for turn in self.turns if machine.said[turn.number] < machine.data_step
            ):
                sent, size = machine.harvest(turn, 0, self.share(machine, self.length), self.done)
                self.bytes, self.updates = self.bytes + size, self.updates + 1
                under_way += [(i, sent) for i in range(len(self.machines)) if i != machine.number]
        for i, sent in under_way:
            self.machines[i].receive(sent)
        agree = all(
            torch.equal(self.machines[0].anchor, machine.anchor) for machine in self.machines
        )
        assert agree, "machines with the same updates differ"
        tokens = self.steps * STEP_TOKENS
        return finished(
            self.curve, self._validate(FINAL), bytes=self.bytes, tokens=tokens, updates=self.updates
        )


def ours(case: Case) -> dict:
    return World(case).run()
