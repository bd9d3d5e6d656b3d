"""A swarm in simulated time: machines that do what their gossip says, over lines of our making, without a socket."""

import heapq
import itertools
import math
import random
from collections import defaultdict

from barnraise.exchange.gossip import gossip as g
from barnraise.exchange.gossip.gossip import Gossip
from barnraise.exchange.network.connection import PIECE_BYTES
from barnraise.protocol.messages import Peer, PeerState

HEADER = (
    4000  # bytes of an update's header with its author's ticket, of a model of fourteen fragments
)
MESSAGE = 200  # bytes of any other message, apart from…
ENTRY = 92  # …what it says of each author
MAX_LINKS = 128  # the hub's


def key_of(number: int) -> str:
    return f"{number:064x}"


def author_of(number: int, life: int = 1) -> str:
    return f"{key_of(number)}.{life:016x}"


def said(vector: dict[str, int], **more) -> PeerState:
    return PeerState(**({"vector": vector, "rate": 1.0} | more))


def met(number: int, *others: int) -> Gossip:
    """A machine that wants what it lacks, linked to others that have said they have nothing."""
    me = Gossip(key_of(number), 0)
    me.start({}, {}, 0.0)
    for other in others:
        me.on_connected(key_of(other), 0.0)
        me.on_state(key_of(other), said({}), 0.0)
    return me


class Simulation:
    """`loss`: of messages and of payloads, whole; `delay` in seconds; `payload`: bytes of an update; `uplink`: bytes/s
    of each machine, one push after the other. `bytes` counts everything that is sent."""

    def __init__(
        self,
        count: int,
        seed: int = 0,
        loss: float = 0.0,
        delay: float = 0.05,
        payload: int = 0,
        uplink: float = math.inf,
    ):
        self.random = random.Random(seed)
        self.loss, self.delay, self.payload, self.uplink, self.now = (
            loss,
            delay,
            payload,
            uplink,
            0.0,
        )
        self.machines: dict[str, Gossip] = {}
        self.held: dict[str, dict[str, set[int]]] = {}  # updates that are here
        self.islands: dict[str, int] = {}
        self.bytes = 0
        self.looks = 0
        self.sent = {kind: 0 for kind in ("push", "state", "ask", "dial", "duplicate")}
        self._free: dict[str, float] = defaultdict(float)  # when a machine's line is
        self._pushing: dict[tuple[str, str], dict[tuple[str, int], float]] = defaultdict(dict)
        self._queue: list = []
        self._look_at: dict[str, float] = {}
        self._order = itertools.count()
        for number in range(count):
            self.join(number, seed + number)

    def join(self, number: int, seed: int, vector: dict[str, int] | None = None) -> Gossip:
        """A machine that starts, with what its ledger held before."""
        key = key_of(number)
        self.machines[key] = machine = Gossip(key, seed)
        self.held.setdefault(key, {})
        machine.start(vector or {}, {}, self.now)
        self._look_at[key] = math.inf
        self.later(0.0, self.act, key)
        return machine

    # ---- time

    def later(self, delay: float, call, *values) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), call, values))

    def run(self, seconds: float, until=lambda: False) -> bool:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, call, values = heapq.heappop(self._queue)
            call(*values)
            if until():
                return True
        self.now = end
        return until()

    def _look(self, key: str, at: float) -> None:
        if key in self.machines and self._look_at[key] == at:
            self.looks += 1
            self._look_at[key] = math.inf
            self.act(key)

    # ---- what machines do

    def act(self, key: str) -> None:
        if (me := self.machines.get(key)) is None:
            return
        for action in me.next_actions(self.now):
            match action:
                case g.Dial(peer):
                    self.sent["dial"] += 1
                    self.later(2 * self.delay, self.dialled, key, peer.key)
                case g.SendState(to):
                    if state := me.build_state(to, self.now):
                        self.sent["state"] += 1
                        told = len(state.vector) + len(state.pruned) + len(state.declined)
                        self.post(key, to, MESSAGE + ENTRY * told, self._told, key, to, state)
                case g.SendPeers(to, peers):
                    told = [peer for peer in peers if peer.key != to]
                    self.post(key, to, MESSAGE * (1 + len(told)), self._introduced, to, told)
                case g.PushUpdate(to, author, seq):
                    self.push(key, to, author, seq)
                case g.RequestUpdates(to, author, first, last):
                    self.sent["ask"] += 1
                    self.post(key, to, MESSAGE, self._asked, to, key, author, first, last)
                case g.SendGoodbye(to):
                    self.post(key, to, MESSAGE, self._parted, key, to)
                case g.Disconnect(peer, _):
                    self.cut(key, peer)
        at = max(self.now + 0.02, me.next_wakeup(self.now))
        if at < self._look_at[key]:
            self._look_at[key] = at
            self.later(at - self.now, self._look, key, at)

    def post(self, source: str, target: str, size: int, call, *values) -> None:
        """A message over a standing link; lost with the link, or by chance."""
        self.bytes += size
        if self.random.random() >= self.loss:
            self.later(self.delay, self._deliver, source, target, call, values)

    def _deliver(self, source: str, target: str, call, values) -> None:
        me = self.machines.get(target)
        if me and source in me.links and self.reachable(source, target):
            me.on_message(source, self.now)
            call(*values)
            self.act(target)

    def _told(self, source: str, to: str, state: PeerState) -> None:
        me = self.machines[to]
        me.on_state(source, state, self.now)
        for (author, seq), began in list(self._pushing[to, source].items()):
            if not me.needs(source, author, seq):  # it said so: the rest of the payload is not sent
                del self._pushing[to, source][author, seq]
                gone = (self.now - began) * self.uplink if self.now > began else 0.0
                sent = min(
                    self.payload,
                    PIECE_BYTES * math.ceil(gone / PIECE_BYTES)
                    if math.isfinite(gone)
                    else self.payload,
                )
                self.bytes += sent
                self.sent["duplicate"] += 1
                self._free[to] = max(self.now, self._free[to] - (self.payload - sent) / self.uplink)

    def _introduced(self, to: str, peers: list[Peer]) -> None:
        self.machines[to].membership.add_peers(peers, self.now, vouched=False)

    def _asked(self, me: str, by: str, author: str, first: int, last: int) -> None:
        self.machines[me].on_request(by, author)
        for seq in range(first, min(last, self.machines[me].vector.get(author, 0)) + 1):
            self.push(me, by, author, seq)

    def _parted(self, source: str, to: str) -> None:
        self.machines[to].on_goodbye(source, self.now)
        self.cut(source, to)

    # ---- updates

    def push(self, source: str, to: str, author: str, seq: int) -> None:
        """Queued behind whatever this machine is sending already."""
        begins = max(self.now, self._free[source])
        self._free[source] = begins + (HEADER + self.payload) / self.uplink
        self.later(begins - self.now, self._begin, source, to, author, seq)

    def _begin(self, source: str, to: str, author: str, seq: int) -> None:
        me = self.machines.get(source)
        if (
            me is None
            or not me.needs(to, author, seq)
            or (author, seq) in self._pushing[source, to]
        ):
            self._free[source] = max(
                self.now, self._free[source] - (HEADER + self.payload) / self.uplink
            )
            return
        self.sent["push"] += 1
        self._pushing[source, to][author, seq] = self.now
        self.post(source, to, HEADER, self._header, source, to, author, seq)
        self.later(self.payload / self.uplink, self._end, source, to, author, seq)

    def _header(self, source: str, to: str, author: str, seq: int) -> None:
        self.machines[to].on_update(source, author, seq, self.now)

    def _end(self, source: str, to: str, author: str, seq: int) -> None:
        if self._pushing[source, to].pop((author, seq), None) is not None:
            self.post(source, to, self.payload, self._whole, source, to, author, seq)

    def _whole(self, source: str, key: str, author: str, seq: int) -> None:
        me = self.machines[key]
        if seq in self.held[key].get(author, ()):
            self.sent["duplicate"] += 1
        me.on_payload_bytes(source, author, seq, self.now)
        self.held[key].setdefault(author, set()).add(seq)
        if seq > me.vector.get(author, 0) + 1:
            me.on_update_buffered(author, seq)
        while (following := me.vector.get(author, 0) + 1) in self.held[key][author]:
            me.on_local_update(author, following)

    def publish(self, number: int) -> None:
        key, author = key_of(number), author_of(number)
        seq = self.machines[key].vector.get(author, 0) + 1
        self.held[key].setdefault(author, set()).add(seq)
        self.machines[key].on_local_update(author, seq)
        self.act(key)

    # ---- links

    def reachable(self, one: str, other: str) -> bool:
        return other in self.machines and self.islands.get(one, 0) == self.islands.get(other, 0)

    def dialled(self, one: str, other: str) -> None:
        if one not in self.machines:
            return
        if (
            not self.reachable(one, other)
            or max(len(self.machines[key].links) for key in (one, other)) >= MAX_LINKS
        ):
            self.machines[one].membership.on_dial_failed(other, self.now)
        elif other in self.machines[one].links:
            self.machines[one].membership.on_connected(other)
        else:
            for me, you in ((one, other), (other, one)):
                self.machines[me].membership.add_peers([Peer(key=you, addresses=["x:1"])], self.now)
                self.machines[me].on_connected(you, self.now)
        for key in (one, other):
            self.act(key)

    def cut(self, one: str, other: str) -> None:
        for me, you in ((one, other), (other, one)):
            self._pushing.pop((me, you), None)
            if me in self.machines:
                self.machines[me].on_disconnected(you, self.now)

    def leave(self, number: int) -> None:
        """A machine vanishes; the others notice that its links are gone."""
        key = key_of(number)
        for other in list(self.machines[key].links):
            self.cut(key, other)
        del self.machines[key]

    def partition(self, islands: dict[int, int]) -> None:
        self.islands = {key_of(n): island for n, island in islands.items()}
        for one, machine in self.machines.items():
            for other in list(machine.links):
                if not self.reachable(one, other):
                    self.cut(one, other)

    def introduce_all(self, hub: int = 0) -> None:
        """Everybody knows one machine; the rest they learn from each other."""
        self.introduce({int(key, 16): [hub] for key in self.machines})

    def introduce(self, hints: dict[int, list[int]]) -> None:
        """As a coordinator would: machine → some others."""
        for number, others in hints.items():
            peers = [
                Peer(key=key_of(other), addresses=["x:1"]) for other in others if other != number
            ]
            self.machines[key_of(number)].membership.add_peers(peers, self.now)
            self.later(0.0, self.act, key_of(number))

    # ---- what came of it

    @property
    def agreed(self) -> bool:
        vectors = [machine.vector for machine in self.machines.values()]
        return bool(vectors[0]) and all(vector == vectors[0] for vector in vectors)

    @property
    def degrees(self) -> list[int]:
        return [len(machine.links) for machine in self.machines.values()]

    @property
    def whole(self) -> bool:
        """Whether everybody is connected to everybody, through others."""
        start = next(iter(self.machines))
        seen, edge = {start}, [start]
        while edge:
            edge = [
                other for key in edge for other in self.machines[key].links if other not in seen
            ]
            seen |= set(edge)
        return len(seen) == len(self.machines)
