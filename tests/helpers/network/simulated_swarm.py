"""Simulate a swarm: machines that carry out the actions of their gossip, in simulated time."""

import heapq
import itertools
import math
import random
from collections import defaultdict

from barnraise.exchange.gossip import gossip as g
from barnraise.exchange.gossip.gossip import Gossip
from barnraise.exchange.gossip.requests import ArrivedBytes
from barnraise.peering.limits.rate_limit import PIECE_BYTES
from barnraise.peering.membership.link_actions import RequestDial
from barnraise.peering.membership.membership import Meeting, PeerSource
from barnraise.protocol.messages import Peer, PeerState

HEADER_BYTES = 4000  # of an update of fourteen fragments, with its author's ticket
MESSAGE_BYTES = 200  # of any other message without its entries
ENTRY_BYTES = 92  # of an author in a state message
MAX_LINKS = 128  # as in the server
OPENED_SECONDS = 8.0  # after a dial, for which a router lets the dialled peer in
DIAL_SECONDS = 10.0  # that a dial waits for an answer


def key_of(number: int) -> str:
    """Return a machine's key; a number alone might be a point of small order."""
    return f"b{number:063x}"


def number_of(key: str) -> int:
    return int(key[1:], 16)


def address_of(key: str) -> str:
    """Return the address of a machine; each has a network of its own."""
    number = number_of(key)
    return f"{10 + (number >> 16)}.{number >> 8 & 255}.{number & 255}.1:1"


def author_of(number: int, life: int = 1) -> str:
    return f"{key_of(number)}.{life:016x}"


def peer_state(vector: dict[str, int], **more) -> PeerState:
    """Create a state message with this version vector."""
    return PeerState(**({"vector": vector, "rate": 1.0} | more))


def connected_gossip(number: int, *others: int) -> Gossip:
    """Create a started gossip with links to others that have reported an empty vector."""
    me = Gossip(key_of(number), 0)
    me.start({}, {}, 0.0)
    for other in others:
        me.on_connected(key_of(other), 0.0, Meeting())
        me.on_state(key_of(other), peer_state({}), 0.0)
    return me


def update_requests(actions: list[g.Action]) -> list[g.RequestUpdates]:
    return [action for action in actions if isinstance(action, g.RequestUpdates)]


class Simulation:
    """A swarm in simulated time.

    Attributes:
        loss: Probability that a message or payload is lost.
        delay: Seconds that a message takes.
        payload: Bytes of an update.
        uplink: Bytes per second of each machine, which sends one push after the other.
        uplinks: Machine → bytes per second, of those with another uplink.
        bytes: All bytes sent so far.
        sent_bytes: Bytes that each machine has sent.
        natted: Keys of machines behind routers; such a machine is reached only by whom it dials.
        stored: The updates of each author that each machine has, also those past a gap.
        wakeups: How often a machine has woken up to act.
        sent: How many messages of each kind were sent; "duplicate" counts payloads sent in vain.
    """

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
        self.loss = loss
        self.delay = delay
        self.payload = payload
        self.uplink = uplink
        self.uplinks: dict[str, float] = {}
        self.now = 0.0
        self.machines: dict[str, Gossip] = {}
        self.stored: dict[str, dict[str, set[int]]] = {}  # machine → author → updates
        self.islands: dict[str, int] = {}
        self.bytes = 0
        self.sent_bytes: dict[str, float] = defaultdict(float)
        self.natted: set[str] = set()
        self.wakeups = 0
        kinds = ("push", "state", "request", "dial", "duplicate", "statement")
        self.sent = {kind: 0 for kind in kinds}
        self._dialled_at: dict[tuple[str, str], float] = {}
        self._pending_dials: dict[tuple[str, str], float] = {}
        self._free: dict[str, float] = defaultdict(float)  # when a machine's uplink is free
        self._pushing: dict[tuple[str, str], dict[tuple[str, int], float]] = defaultdict(dict)
        self._queue: list = []
        self._wakeup_at: dict[str, float] = {}
        self._order = itertools.count()
        for number in range(count):
            self.join(number, seed + number)

    def join(self, number: int, seed: int, vector: dict[str, int] | None = None) -> Gossip:
        """Start a machine whose ledger contains the updates of this vector."""
        key = key_of(number)
        self.machines[key] = machine = Gossip(key, seed)
        self.stored.setdefault(key, {})
        machine.start(vector or {}, {}, self.now)
        self._wakeup_at[key] = math.inf
        self.schedule(0.0, self.carry_out_actions, key)
        return machine

    def set_uplink(self, number: int, rate: float) -> None:
        """Give a machine an uplink of so many bytes per second, which it states."""
        self.uplinks[key_of(number)] = rate
        self.machines[key_of(number)].set_uplink(rate)

    def uplink_of(self, key: str) -> float:
        return self.uplinks.get(key, self.uplink)

    # ---- time

    def schedule(self, delay: float, call, *values) -> None:
        """Call a function after some simulated seconds."""
        heapq.heappush(self._queue, (self.now + delay, next(self._order), call, values))

    def run(self, seconds: float, until=lambda: False) -> bool:
        """Simulate some seconds, or until the condition holds; return whether it holds."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, call, values = heapq.heappop(self._queue)
            call(*values)
            if until():
                return True
        self.now = end
        return until()

    def _wake_up(self, key: str, at: float) -> None:
        if key in self.machines and self._wakeup_at[key] == at:
            self.wakeups += 1
            self._wakeup_at[key] = math.inf
            self.carry_out_actions(key)

    # ---- actions

    def carry_out_actions(self, key: str) -> None:
        """Carry out the actions of a machine's gossip, and schedule its next wake-up."""
        if (me := self.machines.get(key)) is None:
            return
        for action in me.next_actions(self.now):
            match action:
                case g.Dial(peer):
                    self.sent["dial"] += 1
                    self.dial(key, peer.key)
                case g.SendState(to):
                    if state := me.build_state(to, self.now):
                        self.sent["state"] += 1
                        entries = len(state.vector) + len(state.pruned) + len(state.declined)
                        self.send_message(
                            key,
                            to,
                            MESSAGE_BYTES + ENTRY_BYTES * entries,
                            self._on_state,
                            key,
                            to,
                            state,
                        )
                case g.SendPeers(to, peers):
                    others = [peer for peer in peers if peer.key != to]
                    self.send_message(
                        key, to, MESSAGE_BYTES * (1 + len(others)), self._on_peers, key, to, others
                    )
                case g.PushUpdate(to, author, seq):
                    self.push(key, to, author, seq)
                case g.RequestUpdates(to, author, first, last):
                    self.sent["request"] += 1
                    self.send_message(
                        key, to, MESSAGE_BYTES, self._on_request, to, key, author, first, last
                    )
                case g.ProbeAuthor(to, author, seq):
                    self.send_message(key, to, MESSAGE_BYTES, self._on_probe, to, key, author, seq)
                case g.SendGoodbye(to):
                    self.send_message(key, to, MESSAGE_BYTES, self._on_goodbye, key, to)
                case g.CloseLink() | RequestDial():
                    self._perform_rare(key, action)
        self._schedule_wakeup(key)

    def _perform_rare(self, key: str, action: g.CloseLink | RequestDial) -> None:
        if isinstance(action, g.CloseLink):
            self.disconnect(key, action.peer)
        else:
            self._send_statement(key, action.to, action.target, is_answer=False)

    def _schedule_wakeup(self, key: str) -> None:
        at = max(self.now + 0.02, self.machines[key].next_wakeup(self.now))
        if at < self._wakeup_at[key]:
            self._wakeup_at[key] = at
            self.schedule(at - self.now, self._wake_up, key, at)

    def send_message(self, source: str, target: str, size: int, call, *values) -> None:
        """Send a message over a link; it is lost with the link, or by chance."""
        self.bytes += size
        self.sent_bytes[source] += size
        if self.random.random() >= self.loss:
            self.schedule(self.delay, self._deliver, source, target, call, values)

    def _deliver(self, source: str, target: str, call, values) -> None:
        me = self.machines.get(target)
        if me and source in me.links and self.reachable(source, target):
            me.on_message(source, self.now)
            call(*values)
            self.carry_out_actions(target)

    def _on_state(self, source: str, to: str, state: PeerState) -> None:
        me = self.machines[to]
        me.on_state(source, state, self.now)
        for (author, seq), started_at in list(self._pushing[to, source].items()):
            if me.needs(source, author, seq):
                continue
            # The peer has declined the update, so the rest of it is not sent.
            del self._pushing[to, source][author, seq]
            sent = self._bytes_sent_since(to, started_at)
            self.bytes += sent
            self.sent_bytes[to] += sent
            self.sent["duplicate"] += 1
            self._free[to] = max(
                self.now, self._free[to] - (self.payload - sent) / self.uplink_of(to)
            )

    def _bytes_sent_since(self, key: str, started_at: float) -> int:
        """Return how much of a payload has been sent, in whole pieces."""
        if self.now <= started_at:
            return 0
        sent = (self.now - started_at) * self.uplink_of(key)
        if not math.isfinite(sent):
            return self.payload
        return min(self.payload, PIECE_BYTES * math.ceil(sent / PIECE_BYTES))

    def _on_peers(self, source: str, to: str, peers: list[Peer]) -> None:
        membership = self.machines[to].membership
        membership.add_peers(peers, self.now, PeerSource.GOSSIP)
        membership.rendezvous.on_peers(source, [peer.key for peer in peers])

    def _send_statement(self, signer: str, via: str, target: str, is_answer: bool) -> None:
        self.sent["statement"] += 1
        self.send_message(
            signer, via, MESSAGE_BYTES, self._pass_statement, signer, via, target, is_answer
        )

    def _pass_statement(self, signer: str, via: str, target: str, is_answer: bool) -> None:
        me = self.machines[via]
        if target in me.links and me.membership.rendezvous.may_pass(signer, target, self.now):
            self.send_message(
                via, target, MESSAGE_BYTES, self._obey_statement, signer, via, target, is_answer
            )

    def _obey_statement(self, signer: str, via: str, target: str, is_answer: bool) -> None:
        me = self.machines[target]
        if not me.membership.rendezvous.may_obey(signer, via, self.now):
            return
        addresses = [address_of(signer)]
        if me.membership.choose_punch(signer, addresses, me.links, self.now) is None:
            return
        if not is_answer:
            self._send_statement(target, via, signer, is_answer=True)
        self.dial(target, signer)

    def _on_request(self, me: str, by: str, author: str, first: int, last: int) -> None:
        self.machines[me].on_request(by, author)
        for seq in range(first, min(last, self.machines[me].vector.get(author, 0)) + 1):
            if not self.machines[me].carriers.is_carried(by, author, seq):
                self.push(me, by, author, seq)

    def _on_probe(self, me: str, by: str, author: str, seq: int) -> None:
        if seq <= self.machines[me].vector.get(author, 0):
            self.send_message(me, by, HEADER_BYTES, self._on_proof, me, by, author)

    def _on_proof(self, source: str, to: str, author: str) -> None:
        self.machines[to].on_author(source, author)

    def _on_goodbye(self, source: str, to: str) -> None:
        self.machines[to].on_goodbye(source, self.now)
        self.disconnect(source, to)

    # ---- updates

    def push(self, source: str, to: str, author: str, seq: int) -> None:
        """Queue an update behind those that this machine is sending."""
        starts_at = max(self.now, self._free[source])
        self._free[source] = starts_at + (HEADER_BYTES + self.payload) / self.uplink_of(source)
        self.schedule(starts_at - self.now, self._start_push, source, to, author, seq)

    def _start_push(self, source: str, to: str, author: str, seq: int) -> None:
        me = self.machines.get(source)
        if (
            me is None
            or not me.needs(to, author, seq)
            or (author, seq) in self._pushing[source, to]
        ):
            self._free[source] = max(
                self.now,
                self._free[source] - (HEADER_BYTES + self.payload) / self.uplink_of(source),
            )
            return
        self.sent["push"] += 1
        self._pushing[source, to][author, seq] = self.now
        self.send_message(source, to, HEADER_BYTES, self._on_header, source, to, author, seq)
        self.schedule(
            self.payload / self.uplink_of(source), self._end_push, source, to, author, seq
        )

    def _on_header(self, source: str, to: str, author: str, seq: int) -> None:
        self.machines[to].on_author(source, author)
        self.machines[to].on_update(source, author, seq, self.now)

    def _end_push(self, source: str, to: str, author: str, seq: int) -> None:
        if self._pushing[source, to].pop((author, seq), None) is not None:
            if self.machines[source].carriers.on_sent(to, author, seq, self.now):
                self.carry_out_actions(source)
            self.send_message(source, to, self.payload, self._on_payload, source, to, author, seq)

    def _on_payload(self, source: str, key: str, author: str, seq: int) -> None:
        me = self.machines[key]
        if seq in self.stored[key].get(author, ()):
            self.sent["duplicate"] += 1
        arrived = ArrivedBytes(max(1, self.payload))
        me.requests.on_payload_bytes(source, author, seq, self.now, arrived)
        self.stored[key].setdefault(author, set()).add(seq)
        if seq > me.vector.get(author, 0) + 1:
            me.requests.on_buffered(author, seq)
        while (following := me.vector.get(author, 0) + 1) in self.stored[key][author]:
            me.on_local_update(author, following)

    def publish(self, number: int) -> None:
        """Let a machine publish its next update."""
        key, author = key_of(number), author_of(number)
        seq = self.machines[key].vector.get(author, 0) + 1
        self.stored[key].setdefault(author, set()).add(seq)
        self.machines[key].on_local_update(author, seq)
        self.carry_out_actions(key)

    # ---- links

    def dial(self, one: str, other: str) -> None:
        """Let one machine dial another: its router lets the other in for a while."""
        self._dialled_at[one, other] = self._pending_dials[one, other] = self.now
        self.schedule(2 * self.delay, self._try_dial, one, other)
        if other in self.natted:
            self.schedule(DIAL_SECONDS, self._give_up_dial, one, other, self.now)
        if (other, one) in self._pending_dials:  # packets that are sent again get through now
            self.schedule(2 * self.delay, self._try_dial, other, one)

    def _try_dial(self, one: str, other: str) -> None:
        if (one, other) not in self._pending_dials:
            return
        opened_at = self._dialled_at.get((other, one), -math.inf)
        is_open = (other, one) in self._pending_dials or self.now <= opened_at + OPENED_SECONDS
        if other not in self.natted or is_open:
            del self._pending_dials[one, other]
            self.connect(one, other)

    def _give_up_dial(self, one: str, other: str, began_at: float) -> None:
        if self._pending_dials.get((one, other)) != began_at:
            return
        del self._pending_dials[one, other]
        if one in self.machines:
            self.machines[one].membership.on_dial_failed(other, self.now)
            self.carry_out_actions(one)

    def reachable(self, one: str, other: str) -> bool:
        """Return whether the network connects two machines now."""
        return other in self.machines and self.islands.get(one, 0) == self.islands.get(other, 0)

    def connect(self, one: str, other: str) -> None:
        """Let one machine dial another; this fails if it is unreachable or either has no room."""
        if one not in self.machines:
            return
        if (
            not self.reachable(one, other)
            or max(len(self.machines[key].links) for key in (one, other)) >= MAX_LINKS
        ):
            self.machines[one].membership.on_dial_failed(other, self.now)
        elif other in self.machines[one].links:
            self.machines[one].membership.on_refused(
                other, self.now, Meeting("", True, address_of(other))
            )
        else:
            for me, you in ((one, other), (other, one)):
                meeting = Meeting("", me == one, address_of(you))
                self.machines[me].on_connected(you, self.now, meeting)
        for key in (one, other):
            self.carry_out_actions(key)

    def disconnect(self, one: str, other: str) -> None:
        """End the link between two machines."""
        for me, you in ((one, other), (other, one)):
            self._pushing.pop((me, you), None)
            if me in self.machines:
                self.machines[me].on_disconnected(you, self.now)

    def leave(self, number: int) -> None:
        """Remove a machine; the others notice that its links are gone."""
        key = key_of(number)
        for other in list(self.machines[key].links):
            self.disconnect(key, other)
        del self.machines[key]

    def partition(self, islands: dict[int, int]) -> None:
        """Put machines on islands that cannot reach each other; {} heals the network."""
        self.islands = {key_of(n): island for n, island in islands.items()}
        for one, machine in self.machines.items():
            for other in list(machine.links):
                if not self.reachable(one, other):
                    self.disconnect(one, other)

    def introduce_to_hub(self, hub: int = 0) -> None:
        """Introduce every machine to one, from which they learn of each other."""
        self.introduce({number_of(key): [hub] for key in self.machines})

    def introduce(self, hints: dict[int, list[int]]) -> None:
        """Introduce peers as a coordinator would: machine → some others."""
        for number, others in hints.items():
            peers = [
                Peer(key=key_of(other), addresses=[address_of(key_of(other))])
                for other in others
                if other != number
            ]
            self.machines[key_of(number)].membership.add_peers(peers, self.now)
            self.schedule(0.0, self.carry_out_actions, key_of(number))

    # ---- results

    @property
    def has_converged(self) -> bool:
        """Return whether all machines have the same updates."""
        vectors = [machine.vector for machine in self.machines.values()]
        return bool(vectors[0]) and all(vector == vectors[0] for vector in vectors)

    @property
    def degrees(self) -> list[int]:
        """Return the number of links of each machine."""
        return [len(machine.links) for machine in self.machines.values()]

    @property
    def is_connected(self) -> bool:
        """Return whether links lead from each machine to all others, directly or not."""
        start = next(iter(self.machines))
        reached = {start}
        newest = {start}
        while newest:
            newest = {other for key in newest for other in self.machines[key].links} - reached
            reached |= newest
        return len(reached) == len(self.machines)
