"""Whom to dial, whom to tell, what is missing and whom to ask for it: a pure state machine.

Facts go in through methods, each with the time; `act(now)` gives the actions they call for, and `next_at(now)` when to
look again. No socket, no clock, no thread: a thousand peers are tested in one loop. One's own updates are pushed to all
who are linked; everything else spreads by comparing version vectors, so that an update reaches whoever reaches anyone.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from barnraise.wire import Peer

STATE_EVERY = 2.0  # seconds between two States to a peer, ± a quarter
STATE_SOONEST = 0.25  # …and the least between two when something changed
GRACE = 1.0  # how long an author linked to us is trusted to be pushing what we lack
ASKED = 5.0  # seconds for an answer to begin
STALLED = 10.0  # seconds without a byte of an update that is under way
SHUNNED = 20.0  # who did not deliver something is not asked for it again this long
SILENCE = 20.0  # a peer that says nothing for this long is gone
PEERS_EVERY = 30.0
REDIAL_FIRST, REDIAL_MOST = 0.5, 30.0
POLITE = 0.7  # the larger key waits this long with its first dial, so that two do not dial each other at once
WINDOW = 64  # updates of one author under way at once
PER_LINK = 64  # updates asked of one peer at once
MAX_DIALLED = 16  # links we go and look for; others may bring more
MAX_KNOWN = 1000
MAX_TOLD = 2000  # authors in one State: what wire.Vector holds
FORGET_AFTER = 8  # failed dials of a peer that only other peers speak of


@dataclass(frozen=True)
class Dial:
    peer: Peer


@dataclass(frozen=True)
class TellState:
    to: str


@dataclass(frozen=True)
class TellPeers:
    to: str
    peers: tuple[Peer, ...]


@dataclass(frozen=True)
class PushUpdate:
    to: str
    author: str
    seq: int


@dataclass(frozen=True)
class AskFor:
    to: str
    author: str
    first: int
    last: int


@dataclass(frozen=True)
class Drop:
    peer: str
    reason: str


Action = Dial | TellState | TellPeers | PushUpdate | AskFor | Drop


@dataclass
class Known:
    """A peer we have heard of. `vouched`: by a coordinator or by itself, not only by others."""

    addresses: tuple[str, ...]
    vouched: bool
    next_dial: float
    failures: int = 0
    dialling: bool = False


@dataclass
class Linked:
    """A peer we are connected to, and what it last said."""

    key: str
    since: float
    heard: float
    state_at: float  # when it gets our next State, whatever happens
    told: float = -math.inf  # when it got our last
    stale: bool = True  # something changed since
    peers_at: float = 0.0
    vector: dict[str, int] = field(default_factory=dict)
    rate: float = 0.0
    complete: bool = False
    spoke: bool = False  # its first State is here
    shunned: dict[tuple[str, int], float] = field(default_factory=dict)  # asked in vain, until


@dataclass
class Flight:
    """An update on its way to us; nobody else is asked for it until `deadline`."""

    source: str
    deadline: float


class Gossip:
    def __init__(self, key: str, seed: int):
        self.key = key
        self.vector: dict[str, int] = {}  # what is in our ledger
        self.asking = False  # whether we want what we lack (not while the snapshot is being fetched)
        self.links: dict[str, Linked] = {}
        self.known: dict[str, Known] = {}
        self.flights: dict[tuple[str, int], Flight] = {}
        self.banned: set[str] = set()  # authors nothing more is taken of
        self._noticed: dict[tuple[str, int], float] = {}
        self._pushes: list[PushUpdate] = []
        self._random = random.Random(seed)
        self._wake = math.inf  # of the asks that wait for their grace

    # ---- facts

    def introduce(self, peers: list[Peer], now: float, vouched: bool = True) -> None:
        """Peers to know of, from a coordinator or the peer itself (`vouched`), or hearsay, which never overrides."""
        for peer in peers:
            known = self.known.get(peer.key)
            if peer.key == self.key or not peer.addresses or (known is None and not self._makes_room(vouched)):
                continue
            if known is None:
                polite = POLITE * (1 + self._random.random()) if self.key > peer.key else 0.0
                self.known[peer.key] = Known(tuple(peer.addresses), vouched, now + polite)
            elif vouched or (not known.vouched and known.failures):
                if tuple(peer.addresses) != known.addresses:
                    known.failures, known.next_dial = 0, min(known.next_dial, now + REDIAL_FIRST)
                known.addresses, known.vouched = tuple(peer.addresses), vouched or known.vouched

    def _makes_room(self, vouched: bool) -> bool:
        """Whether one more may be known. Hearsay gives way to who is vouched for: else whoever tells us of enough
        machines that do not exist would keep us from all that do."""
        if len(self.known) < MAX_KNOWN:
            return True
        hearsay = (key for key, known in self.known.items() if not known.vouched and key not in self.links)
        if vouched and (least := next(hearsay, None)):
            del self.known[least]
            return True
        return False

    def linked(self, key: str, now: float) -> None:
        """A peer stands connected (anew: what the old connection had promised is void)."""
        self._void(key)
        self.links[key] = Linked(key, now, now, self._soon(now))
        if known := self.known.get(key):
            known.dialling, known.failures = False, 0

    def unlinked(self, key: str, now: float) -> None:
        self.links.pop(key, None)
        self._void(key)
        if known := self.known.get(key):
            known.next_dial = now + REDIAL_FIRST * (1 + self._random.random())

    def dial_failed(self, key: str, now: float, refused: bool = False) -> None:
        """Nobody answered, or it would not have us (`refused`: try rarely)."""
        known = self.known.get(key)
        if known is None:
            return
        known.dialling = False
        known.failures += 1
        if known.failures >= FORGET_AFTER and not known.vouched:
            del self.known[key]
            return
        wait = REDIAL_MOST if refused else min(REDIAL_MOST, REDIAL_FIRST * 2 ** min(known.failures, 10))
        known.next_dial = now + wait * (0.75 + self._random.random() / 2)

    def heard(self, key: str, now: float) -> None:
        if link := self.links.get(key):
            link.heard = now

    def told_state(self, key: str, vector: dict[str, int], rate: float, complete: bool, now: float) -> None:
        if link := self.links.get(key):
            link.heard, link.vector, link.rate, link.complete, link.spoke = now, vector, rate, complete, True

    def changed(self) -> None:
        """Something in our State did; peers hear of it soon."""
        for link in self.links.values():
            link.stale = True

    def holds(self, author: str, seq: int, own: bool = False) -> None:
        """Our ledger has this author's updates up to `seq`. One's `own` new update is pushed to all linked."""
        self.vector[author] = max(seq, self.vector.get(author, 0))
        self.flights.pop((author, seq), None)
        self._noticed.pop((author, seq), None)
        if own:
            self._pushes += [
                PushUpdate(link.key, author, seq) for link in self.links.values() if link.vector.get(author, 0) < seq
            ]
        self.changed()

    def arriving(self, key: str, author: str, seq: int, now: float) -> None:
        """Bytes of an update that we lack have come from this peer."""
        if seq > self.vector.get(author, 0):
            self.flights[author, seq] = Flight(key, now + STALLED)

    def waiting(self, author: str, seq: int) -> None:
        """An update is whole here and waits for its author's earlier ones."""
        self.flights[author, seq] = Flight("", math.inf)

    def failed(self, key: str, author: str, seq: int, now: float) -> None:
        """This peer cannot give us that update after all."""
        self.flights.pop((author, seq), None)
        if link := self.links.get(key):
            link.shunned[author, seq] = now + SHUNNED

    def ban(self, author: str) -> None:
        self.banned.add(author)

    def ruled(self, vector: dict[str, int], clamped: Callable[[dict], dict], out: Callable[[str, int], bool]) -> None:
        """A verdict took updates out: our ledger is at `vector` now, and of what peers have only `clamped` counts."""
        self.vector = dict(vector)
        for link in self.links.values():
            link.vector = clamped(link.vector)
        self.flights = {what: flight for what, flight in self.flights.items() if not out(*what)}
        self.changed()

    # ---- what is known

    @property
    def behind(self) -> int:
        """How many updates the peers have, taken together, that we lack."""
        best: dict[str, int] = {}
        for link in list(self.links.values()):  # other threads look too
            for author, seq in link.vector.items():
                best[author] = max(seq, best.get(author, 0))
        return sum(max(0, seq - self.vector.get(author, 0)) for author, seq in best.items())

    @property
    def settled(self) -> bool:
        """Every linked peer publishes no more and has exactly what we have. True when there is none."""
        links = list(self.links.values())
        return all(link.spoke and link.complete and link.vector == self.vector for link in links)

    # ---- what follows

    def act(self, now: float) -> list[Action]:
        actions: list[Action] = list(self._pushes)
        self._pushes = []
        for link in list(self.links.values()):
            if now >= link.heard + SILENCE:
                actions.append(Drop(link.key, f"it said nothing for {SILENCE:.0f} seconds"))
                link.heard = now  # once is enough
            if now >= link.state_at or (link.stale and now >= link.told + STATE_SOONEST):
                actions.append(TellState(link.key))
                link.told, link.stale, link.state_at = now, False, self._soon(now)
            if now >= link.peers_at:
                link.peers_at = now + PEERS_EVERY
                if others := self._others(link.key):
                    actions.append(TellPeers(link.key, others))
        return actions + self._dials(now) + self._asks(now)

    def next_at(self, now: float) -> float:
        """When `act` is worth calling again if no fact comes in before."""
        times = [now + STATE_EVERY, self._wake]
        for link in self.links.values():
            times += [link.heard + SILENCE, link.state_at, link.peers_at]
            if link.stale:
                times.append(link.told + STATE_SOONEST)
        if self._room() > 0:
            times += [k.next_dial for key, k in self.known.items() if not k.dialling and key not in self.links]
        times += [flight.deadline for flight in self.flights.values()]
        return max(now, min(times))

    def told(self) -> dict[str, int]:
        """The vector for a State: whole as long as a message can hold it, then ever another part of it."""
        if len(self.vector) <= MAX_TOLD:
            return dict(self.vector)
        return dict(self._random.sample(sorted(self.vector.items()), MAX_TOLD))

    def some(self, count: int) -> list[tuple[str, int]]:
        """Some authors and their last updates here, ever others."""
        return self._random.sample(sorted(self.vector.items()), min(count, len(self.vector)))

    def _dials(self, now: float) -> list[Action]:
        due = [
            key
            for key, known in self.known.items()
            if not known.dialling and known.next_dial <= now and key not in self.links
        ]
        self._random.shuffle(due)
        due.sort(key=lambda key: not self.known[key].vouched)
        chosen = due[: max(0, self._room())]
        for key in chosen:
            self.known[key].dialling = True
        return [Dial(Peer(key=key, addresses=list(self.known[key].addresses))) for key in chosen]

    def _room(self) -> int:
        return MAX_DIALLED - len(self.links) - sum(known.dialling for known in self.known.values())

    def _others(self, key: str) -> tuple[Peer, ...]:
        """Some peers that are worth telling this one about: those we are connected to."""
        keys = [k for k in self.links if k != key and k in self.known]
        self._random.shuffle(keys)
        return tuple(Peer(key=k, addresses=list(self.known[k].addresses)) for k in keys[:32])

    def _asks(self, now: float) -> list[Action]:
        self._wake = math.inf
        for (author, seq), flight in list(self.flights.items()):
            if now >= flight.deadline:
                self.failed(flight.source, author, seq, now)
            elif seq <= self.vector.get(author, 0):
                del self.flights[author, seq]
        if not self.asking:
            return []
        load = {key: 0 for key in self.links}
        for flight in self.flights.values():
            if flight.source in load:
                load[flight.source] += 1
        ahead: dict[str, list[Linked]] = {}
        for link in self.links.values():
            link.shunned = {what: until for what, until in link.shunned.items() if until > now}
            for author, seq in link.vector.items():
                if seq > self.vector.get(author, 0) and author not in self.banned:
                    ahead.setdefault(author, []).append(link)
        self._noticed = {what: at for what, at in self._noticed.items() if what[0] in ahead}
        wanted: list[tuple[str, str, int]] = []
        for author, links in ahead.items():
            mine = self.vector.get(author, 0)
            last = min(mine + WINDOW, max(link.vector[author] for link in links))
            wanted += self._asks_of(author, range(mine + 1, last + 1), links, load, now)
        return _runs(wanted)

    def _asks_of(self, author, seqs, links: list[Linked], load: dict[str, int], now: float) -> list:
        """(peer, author, seq) for what is missing of one author, not under way, and past its grace."""
        wanted = []
        grace = GRACE if author.partition(".")[0] in self.links else 0.0
        favourite = None
        for seq in seqs:
            if (author, seq) in self.flights:
                continue
            ripe = self._noticed.setdefault((author, seq), now) + grace
            if ripe > now:
                self._wake = min(self._wake, ripe)
                continue
            holders = [link for link in links if link.vector[author] >= seq and load[link.key] < PER_LINK]
            able = [link for link in holders if (author, seq) not in link.shunned]
            if not able:
                self._wake = min([self._wake] + [link.shunned[author, seq] for link in holders])
                continue
            if favourite not in able:
                favourite = min(able, key=lambda link: (load[link.key], self._random.random()))
            load[favourite.key] += 1
            self.flights[author, seq] = Flight(favourite.key, now + ASKED)
            wanted.append((favourite.key, author, seq))
        return wanted

    def _void(self, key: str) -> None:
        self.flights = {what: flight for what, flight in self.flights.items() if flight.source != key}

    def _soon(self, now: float) -> float:
        return now + STATE_EVERY * (0.75 + self._random.random() / 2)


def _runs(wanted: list[tuple[str, str, int]]) -> list[Action]:
    """Neighbouring seqs asked of one peer become one question."""
    asks: list[Action] = []
    for to, author, seq in wanted:
        last = asks[-1] if asks else None
        if isinstance(last, AskFor) and (last.to, last.author, last.last) == (to, author, seq - 1):
            asks[-1] = AskFor(to, author, last.first, seq)
        else:
            asks.append(AskFor(to, author, seq, seq))
    return asks
