"""Simulate machines on home lines and one on a fast line, as the relay benchmark runs them.

Each machine plans its rounds and ends them as the exchange does. Its line carries one piece after
the other: own fresh updates first, then those of all connections in turn. A peer's line takes what
it is sent no faster than it carries.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean

from helpers.network.simulated_swarm import (
    HEADER_BYTES,
    Simulation,
    author_of,
    key_of,
    number_of,
)
from helpers.updates.headers import build_update

from barnraise.exchange.gossip.requests import ArrivedBytes
from barnraise.exchange.updates.update_sender import UpdateTraffic
from barnraise.exchange.weights.contribution import ContributionMeter
from barnraise.exchange.weights.peer_estimates import PeerEstimates
from barnraise.peering.limits.rate_limit import TURN_SECONDS
from barnraise.planning.lines import HOME_LINE, LINES
from barnraise.planning.round_schedule import RoundSchedule
from barnraise.planning.uplink_budget import UplinkUse
from barnraise.protocol.messages import PeerState, Update
from barnraise.spec import ModelSpec, Recipe, RunSpec

MACHINES = 16
SLOWER = 20  # than real lines, and the model is as much smaller
HOME, DOWN, FAST = (
    rate / SLOWER for rate in (HOME_LINE.up_bytes, HOME_LINE.down_bytes, LINES[-1].up_bytes)
)
GIVEN = 0.9  # of the line, by its volunteer
SPEC = RunSpec(
    ModelSpec(layers=3, width=128, heads=4, context=128, vocabulary=256),
    recipe=Recipe(
        token_budget=1 << 40,
        step_sequences=16,
        codec="auto",
        strategy="windows",
        schedule="constant",
    ),
)
SIZES = tuple(fragment.size for fragment in SPEC.model.fragments())
STEP_SECONDS = 0.05
TICK = 0.1  # seconds between two looks at a round that waits for its line
QUEUE_SECONDS = 0.3  # of its line that a peer may be sent ahead
UNANSWERED_BYTES = 100_000  # that a machine sends to one that is gone
ACK_SHARE = 0.03  # of what arrives: the bytes of the packets by which QUIC acknowledges it

# The bytes of a piece, and what happens at its peer once it has arrived.
Piece = tuple[float, Callable[..., None], tuple[object, ...]]


@dataclass
class Sender:
    """What one connection is sent: own fresh updates, or all else."""

    to: str
    queue: dict[tuple[str, int, int | None], float] = field(default_factory=dict)  # its rank
    pieces: Iterator[Piece] = field(default_factory=lambda: iter(()))
    rank: float = math.inf  # of the transfer in progress
    unanswered: float = 0.0

    def next_piece(self, read: Callable[..., Iterator[Piece]]) -> Piece | None:
        """Return what is sent next; None if nothing waits."""
        while (piece := next(self.pieces, None)) is None:
            if not self.queue:
                return None
            item = next(iter(self.queue))
            self.rank = self.queue.pop(item)
            self.pieces = read(self.to, *item)
        return piece


class SharedLine:
    """An uplink that connections share."""

    def __init__(self, swarm: "RelaySwarm", key: str, rate: float) -> None:
        self.rate = rate
        self.sent = 0.0
        self.message_bytes = 0
        self._swarm = swarm
        self._key = key
        self._senders: dict[tuple[str, bool], Sender] = {}  # in the order of their turns
        self._waiting: dict[tuple[str, bool], Piece] = {}
        self._turn: Sender | None = None
        self._turn_bytes = 0.0
        self._message_debt = 0.0
        self._is_busy = False

    def add(self, to: str, item: tuple[str, int, int | None], rank: float) -> None:
        """Queue an update, or a part of it, for a peer."""
        sender = self._senders.setdefault((to, rank < math.inf), Sender(to))
        sender.queue.setdefault(item, rank)
        self.serve()

    def record_message(self, size: int) -> None:
        """Send a message, which does not wait."""
        self.message_bytes += size
        self._message_debt += size

    def drop(self, to: str) -> None:
        """Forget what waits for a peer."""
        for is_own in (False, True):
            self._senders.pop((to, is_own), None)
            self._waiting.pop((to, is_own), None)

    def serve(self) -> None:
        """Send the next piece, if the line is free."""
        if self._is_busy:
            return
        ready: list[tuple[str, bool]] = []
        for name, sender in self._senders.items():
            if name not in self._waiting:
                piece = sender.next_piece(self._read)
                if piece is not None:
                    self._waiting[name] = piece
            if name in self._waiting and self._can_take(sender):
                ready.append(name)
        if not ready:
            return
        name = min(ready, key=lambda name: self._senders[name].rank)
        first = self._senders[name]
        for other in ready:
            is_its_turn = self._senders[other] is self._turn and self._turn_bytes > 0
            if is_its_turn and self._turn.rank <= first.rank:
                name = other
        sender = self._senders.pop(name)
        self._senders[name] = sender
        if sender is not self._turn or self._turn_bytes <= 0:
            self._turn = sender
            is_fresh = sender.rank < math.inf
            self._turn_bytes = math.inf if is_fresh else self.rate * TURN_SECONDS
        piece = self._waiting.pop(name)
        self._turn_bytes -= piece[0]
        self._is_busy = True
        seconds = (piece[0] + self._message_debt) / self.rate
        self._message_debt = 0.0
        self._swarm.schedule(seconds, self._finish, sender, piece)

    def _read(self, to: str, author: str, seq: int, part: int | None) -> Iterator[Piece]:
        return self._swarm.read(self._key, to, author, seq, part)

    def _can_take(self, sender: Sender) -> bool:
        if sender.to in self._swarm.killed:
            return sender.unanswered < UNANSWERED_BYTES
        return self._swarm.received_at[sender.to] <= self._swarm.now + QUEUE_SECONDS

    def _finish(self, sender: Sender, piece: Piece) -> None:
        self._is_busy = False
        size, call, values = piece
        self.sent += size
        sender.unanswered += size
        swarm = self._swarm
        arrives_at = max(swarm.now + swarm.delay, swarm.received_at[sender.to]) + size / DOWN
        swarm.received_at[sender.to] = arrives_at
        if sender.to not in swarm.killed:
            swarm.lines[sender.to].message_bytes += int(ACK_SHARE * size)  # no limit holds them up
        swarm.schedule(arrives_at - swarm.now, swarm.arrive, self._key, sender.to, call, values)
        swarm.schedule(arrives_at - swarm.now, self.serve)
        self.serve()


class RelaySwarm(Simulation):
    """Sixteen machines on home lines; number 0 may get a fast one.

    Attributes:
        killed: Keys of machines that are gone without a word.
        received_at: Machine → when its line has brought all that it was sent.
        lines: Machine → its uplink.
        schedules: Machine → its round.
        published: Machine's number → when each of its updates was published.
        arrived: (author, seq) → machine's number → when it arrived there.
    """

    def __init__(self, seed: int = 0) -> None:
        self.killed: set[str] = set()
        self.received_at: dict[str, float] = defaultdict(float)
        self.lines: dict[str, SharedLine] = {}
        self.schedules: dict[str, RoundSchedule] = {}
        self.published: dict[int, list[float]] = defaultdict(list)
        self.arrived: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        self._traffic: dict[str, UpdateTraffic] = {}
        self._estimates: dict[str, PeerEstimates] = {}
        self._updates: dict[tuple[str, int], Update] = {}
        self._sizes: dict[tuple[str, int], float] = {}
        self._parts: dict[tuple[str, str, int], set[int]] = {}  # that have arrived at a machine
        self._round_began_at: dict[str, float] = {}
        self._ranks = itertools.count()
        super().__init__(MACHINES, seed=seed)
        for number, key in enumerate(list(self.machines)):
            self.lines[key] = SharedLine(self, key, GIVEN * HOME)
            self.set_uplink(number, GIVEN * HOME)
            self.machines[key].set_progress(self._rate(key), complete=False)
            self._traffic[key] = UpdateTraffic()
            contribution = ContributionMeter(list(SIZES), seed=1)
            self._estimates[key] = PeerEstimates(SPEC, self.machines[key], contribution)
            self.schedule(1 + TICK * number, self._plan, key)
        self.introduce({n: [*range(MACHINES)] for n in range(MACHINES)})

    # ---- what happens to machines

    def speed_up(self) -> None:
        """Give machine 0 a fast line."""
        self.lines[key_of(0)].rate = GIVEN * FAST
        self.set_uplink(0, GIVEN * FAST)

    def kill(self, number: int) -> None:
        """Let a machine send nothing from now on; its links stay until others miss it."""
        self.killed.add(key_of(number))
        del self.machines[key_of(number)]

    def disconnect(self, one: str, other: str) -> None:
        """End the link between two machines, and what they are sending each other."""
        super().disconnect(one, other)
        self.lines[one].drop(other)
        self.lines[other].drop(one)

    # ---- what is measured

    @property
    def slow(self) -> list[str]:
        """The keys of the machines on home lines."""
        return [key_of(number) for number in range(1, MACHINES)]

    def mean_copies(self) -> float:
        """Return how many copies of their own updates slow machines send, on average."""
        return fmean(self.use(key).copies for key in self.slow)

    def bytes_sent(self) -> list[float]:
        """Return the bytes that each slow machine has sent."""
        return [self.lines[key].sent + self.lines[key].message_bytes for key in self.slow]

    def rounds_each(self, start: float, end: float) -> float:
        """Return how many rounds a slow machine published per second, on average."""
        counts = [sum(start <= at < end for at in self.published[n]) for n in range(1, MACHINES)]
        return fmean(counts) / (end - start)

    def rounds_until_repaired(self, killed_at: float) -> list[float]:
        """Return each survivor's rounds until one of them has reached all others; inf: none has."""
        rounds: list[float] = []
        for number in range(1, MACHINES):
            reached = [
                max(arrived.values())
                for seq, at in enumerate(self.published[number], 1)
                if at >= killed_at
                and len((arrived := self.arrived[author_of(number), seq]).keys() - {0})
                == MACHINES - 2
            ]
            times = self.published[number]
            count = sum(killed_at <= at < min(reached, default=0) for at in times)
            rounds.append(count if reached else math.inf)
        return rounds

    # ---- rounds

    def _rate(self, key: str) -> float:
        return SPEC.step_tokens / (STEP_SECONDS if number_of(key) else 16 * STEP_SECONDS)

    def use(self, key: str) -> UplinkUse:
        """Return what a machine's line carries, as the exchange measures it."""
        me, line = self.machines[key], self.lines[key]
        self._traffic[key].on_line(int(line.sent + line.message_bytes), self.now)
        return self._traffic[key].use(line.rate, len(me.links), me.carrier_rate)

    def _plan(self, key: str) -> None:
        schedule = self._estimates[key].plan_round(
            self._rate(key), self.use(key), self.now, 1e9 + self.now
        )
        self.schedules[key] = schedule
        self._round_began_at[key] = self.now
        seconds = schedule.steps * SPEC.step_tokens / self._rate(key)
        if math.isfinite(schedule.ends_at):
            seconds = schedule.ends_at - 1e9 - self.now
        self.schedule(max(TICK, seconds), self._end_round, key)

    def _end_round(self, key: str) -> None:
        if (me := self.machines.get(key)) is None:
            return
        is_busy = self.now < self._traffic[key].free_at(self.use(key))
        if is_busy or me.carriers.owes_update:
            self.schedule(TICK, self._end_round, key)
            return
        number = number_of(key)
        author = author_of(number)
        seq = me.vector.get(author, 0) + 1
        size = self.schedules[key].scheme.payload_size(sum(SIZES))
        tokens = int(self._rate(key) * (self.now - self._round_began_at[key]))
        update = build_update(
            key, seq, volunteer=key, tokens=max(1, tokens), time_ms=int(1000 * self.now)
        )
        self._updates[author, seq], self._sizes[author, seq] = update, size
        self._traffic[key].on_published(size, self.now, me.has_carrier)
        self.published[number].append(self.now)
        self.publish(number)
        self._plan(key)

    # ---- lines

    def send_message(
        self, source: str, target: str, size: int, call: Callable[..., None], *values: object
    ) -> None:
        """Send a message over a link, before all pieces."""
        if source in self.machines:
            self.lines[source].record_message(size)
            late = max(0.0, self.received_at[target] - self.now)
            self.schedule(self.delay + late, self._deliver, source, target, call, values)

    def push(self, source: str, to: str, author: str, seq: int) -> None:
        """Queue an update."""
        is_own = author.startswith(source)
        rank = next(self._ranks) if is_own else math.inf
        self.lines[source].add(to, (author, seq, None), rank)

    def _on_request(self, me: str, by: str, author: str, first: int, last: int) -> None:
        machine = self.machines[me]
        for seq in range(first, min(last, machine.vector.get(author, 0)) + 1):
            arrived = self._parts.get((by, author, seq))
            if arrived is not None:  # the rest of an update whose header it has
                for part in set(range(len(SIZES))) - arrived:
                    self.lines[me].add(by, (author, seq, part), math.inf)
                continue
            machine.on_request(by, author)
            if not machine.carriers.is_carried(by, author, seq):
                self.lines[me].add(by, (author, seq, None), math.inf)

    def read(self, key: str, to: str, author: str, seq: int, part: int | None) -> Iterator[Piece]:
        """Yield the pieces of an update, or one part, as long as the peer needs it."""
        size = self._sizes[author, seq] / len(SIZES)
        traffic = self._traffic[key]
        if part is not None:
            yield size, self._on_part, (author, seq, part)
            traffic.on_sent(int(size), is_own=False)
            return
        if not self._needs(key, to, author, seq):
            return
        yield HEADER_BYTES, self._on_update_header, (author, seq)
        for index in range(len(SIZES)):
            if not self._needs(key, to, author, seq):
                return
            yield size, self._on_part, (author, seq, index)
            traffic.on_sent(int(size), author.startswith(key))
        me = self.machines.get(key)
        if me and me.carriers.on_sent(to, author, seq, self.now):
            self.schedule(0.0, self.carry_out_actions, key)

    def _needs(self, key: str, to: str, author: str, seq: int) -> bool:
        return key in self.machines and self.machines[key].needs(to, author, seq)

    def arrive(
        self, source: str, to: str, call: Callable[..., None], values: tuple[object, ...]
    ) -> None:
        """Let a piece arrive at a peer."""
        me = self.machines.get(to)
        if me is not None and source in me.links and source not in self.killed:
            me.on_message(source, self.now)
            call(source, to, *values)

    def _on_update_header(self, source: str, to: str, author: str, seq: int) -> None:
        me = self.machines[to]
        me.on_author(source, author)
        if seq > me.vector.get(author, 0):
            self._parts.setdefault((to, author, seq), set())
        me.on_update(source, author, seq, self.now)
        self.carry_out_actions(to)

    def _on_part(self, source: str, to: str, author: str, seq: int, part: int) -> None:
        me = self.machines[to]
        arrived = self._parts.get((to, author, seq))
        if arrived is None or part in arrived:
            return
        arrived.add(part)
        size = int(self._sizes[author, seq] / len(SIZES))
        bytes_here = ArrivedBytes(size, size * (len(SIZES) - len(arrived)))
        me.requests.on_payload_bytes(source, author, seq, self.now, bytes_here)
        if len(arrived) < len(SIZES):
            return
        self.stored[to].setdefault(author, set()).add(seq)
        if seq > me.vector.get(author, 0) + 1:
            me.requests.on_buffered(author, seq)
        while (following := me.vector.get(author, 0) + 1) in self.stored[to][author]:
            del self._parts[to, author, following]
            self.arrived[author, following][number_of(to)] = self.now
            self._estimates[to].on_update_received(self._updates[author, following], self.now)
            me.on_local_update(author, following)
        self.carry_out_actions(to)

    def _on_state(self, source: str, to: str, state: PeerState) -> None:
        self.machines[to].on_state(source, state, self.now)
