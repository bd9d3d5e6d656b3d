"""Whom to tell what, what is missing and whom to ask for it: a pure state machine.

Facts go in through methods, each with the time; `act(now)` gives the actions they call for, and `next_at(now)` when to
look again. No socket, no clock, no thread: a thousand peers are tested in one loop.

New updates spread along a tree, after Plumtree (Leitão, Pereira and Rodrigues, SRDS 2007). What is new is pushed over
eager links, and over lazy ones only announced, in the next State. Who is pushed what it has, or what somebody else is
in the middle of sending, says so, and that link is lazy from then on: in a while every update reaches everybody once.
Who hears of an update that does not come asks whoever announced it, and that link is eager again: a tree that is cut
mends itself. Beneath it lies anti-entropy: States say what changed since the last, and now and then everything.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from barnraise.exchange.gossip.membership import FEW, Circle
from barnraise.exchange.gossip.requests import Asking
from barnraise.protocol.messages import Peer, PeerState

STATE_EVERY = 5.0  # seconds between two States to a peer when nothing changes, ± a quarter
STATE_SOONEST = 2.0  # …and the least between two when something does that is news to it
WHOLE_EVERY = 30.0  # seconds between two that say everything, ± a quarter
SILENCE = 20.0  # a peer that says nothing for this long is gone
PARTING = 5.0  # …and one that was told goodbye
PEERS_EVERY = 30.0
MAX_TOLD = 1100  # authors in one State: with `gone`, as much as a header holds
MAX_AUTHORS = 50_000  # remembered of one peer
MAX_SPARED = 200  # pushes declined in one State
STEADY = 0.05  # by which our rate may have changed since it was told
COMPARED = 16  # of our anchors, with those of peers that come to the same vector sooner or later


@dataclass(frozen=True)
class Dial:
    peer: Peer


@dataclass(frozen=True)
class TellState:
    """`tell` says what is in it, once it can go out."""

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
class Goodbye:
    """It has other links, and we have too many."""

    to: str


@dataclass(frozen=True)
class Drop:
    peer: str
    reason: str


Action = Dial | TellState | TellPeers | PushUpdate | AskFor | Goodbye | Drop


@dataclass
class Linked:
    """A peer we are connected to: what it last said, and what it is to be told."""

    key: str
    since: float
    heard: float
    whole_at: float  # when it gets our next whole State
    state_at: float = 0.0  # when it gets our next State, whatever happens
    told: float = -math.inf  # when it got our last
    peers_at: float = 0.0
    stale: bool = True  # something changed since
    changed: dict[str, None] = field(
        default_factory=dict
    )  # authors whose updates it was not told of (ordered)
    spare: dict[str, int] = field(
        default_factory=dict
    )  # what it need not push to us: author → up to
    eager: bool = True  # new updates are pushed to it, and not only announced
    leaving: float | None = None  # since when it is being let go
    vector: dict[str, int] = field(default_factory=dict)
    gone: dict[str, int] = field(
        default_factory=dict
    )  # author → up to where it has the payloads no more
    spared: dict[str, int] = field(default_factory=dict)  # what it asked us not to push
    rate: float = 0.0
    stands: str | None = None  # a version vector, by its digest…
    anchor: str | None = None  # …and the digest of its anchor there
    agrees: bool | None = None  # with ours, the last time both were at one vector
    degree: int = 0  # its links
    complete: bool = False
    spoke: bool = False  # its first State is here


class Gossip:
    def __init__(self, key: str, seed: int):
        self.key = key
        self.vector: dict[str, int] = {}  # what is in our ledger
        self.gone: dict[str, int] = {}  # author → up to where we have the payloads no more
        self.wanting = (
            False  # whether we want what we lack (not while the snapshot is being fetched)
        )
        self.rate, self.complete = 0.0, False
        self.anchors: dict[
            str, str
        ] = {}  # of our anchor at the last few version vectors, by their digests
        self.links: dict[str, Linked] = {}
        self.circle = Circle(key, seed)
        self.asking = Asking(seed)
        self._pushes: list[PushUpdate] = []
        self._random = random.Random(seed)

    # ---- facts

    def begin(self, vector: dict[str, int], gone: dict[str, int], now: float) -> None:
        """Our ledger stands at `vector`, its payloads after `gone`; from now on we want what we lack."""
        self.vector, self.gone, self.wanting = dict(vector), dict(gone), True
        self.asking.begin()
        for link in self.links.values():
            link.whole_at, link.stale = now, True
            self.asking.notice(link.key, link.vector, self.vector)

    def linked(self, key: str, now: float) -> None:
        """A peer stands connected (anew: what the old connection had promised is void)."""
        self.asking.void(key)
        eager = sum(link.eager for link in self.links.values()) < FEW
        self.links[key] = Linked(key, now, now, whole_at=now, eager=eager)
        self.circle.met(key)

    def unlinked(self, key: str, now: float) -> None:
        link = self.links.pop(key, None)
        self.asking.void(key)
        self.circle.lost(key, now, let_go=link is not None and link.leaving is not None)

    def heard(self, key: str, now: float) -> None:
        if link := self.links.get(key):
            link.heard = now

    def told_state(self, key: str, state: PeerState, now: float) -> None:
        if (link := self.links.get(key)) is None:
            return
        link.heard, link.spoke = now, True
        link.rate, link.complete, link.degree = state.rate, state.complete, state.links
        link.stands, link.anchor = state.anchor_vector, state.anchor_digest
        self._compare(link)
        if state.full:
            link.vector, link.gone = dict(state.vector), dict(state.pruned)
        elif len(link.vector) + len(state.vector) <= MAX_AUTHORS:
            for author, seq in state.vector.items():
                link.vector[author] = max(seq, link.vector.get(author, 0))
            link.gone |= state.pruned
        if state.declined:
            link.eager, link.spared = False, dict(state.declined)
        link.stale = link.stale or (state.complete and bool(link.changed))
        self.asking.notice(key, state.vector, self.vector)

    def stands(self, vector: str, anchor: str) -> None:
        """Our anchor's digest at a version vector, by its digest."""
        if self.anchors.get(vector) != anchor:
            self.anchors = dict([*self.anchors.items(), (vector, anchor)][-COMPARED:])
            for link in self.links.values():
                self._compare(link)

    def announce(self, rate: float, complete: bool) -> None:
        """Tokens/s we train at, and whether we publish no more."""
        if self.news(rate, complete):
            self.rate, self.complete = rate, complete
            for link in self.links.values():
                link.stale = True

    def news(self, rate: float, complete: bool) -> bool:
        """Whether that would be any: a rate that hardly moved is not. Safe to call from another thread."""
        return complete != self.complete or abs(rate - self.rate) > STEADY * self.rate

    def holds(self, author: str, seq: int) -> None:
        """Our ledger has this author's updates up to `seq`: those who lack it are pushed it, or told soon. Who has it
        or gets it hears so with the next State, and soon only where one of the two is about to end."""
        self.vector[author] = max(seq, self.vector.get(author, 0))
        self.asking.held(author, seq)
        for link in self.links.values():
            link.changed[author] = None
            lacks = self.lacks(link.key, author, seq)
            if lacks and link.eager and link.spoke:
                self._pushes.append(PushUpdate(link.key, author, seq))
                lacks = False
            link.stale = link.stale or lacks or link.complete or self.complete

    def pruned(self, author: str, seq: int) -> None:
        """The payloads of this author's updates up to `seq` are here no more."""
        self.gone[author] = seq
        for link in self.links.values():
            link.changed[author] = None

    def pushed(self, key: str, author: str, seq: int, now: float) -> None:
        """The header of an update that counts has come from this peer: its payloads will, too, unless they are here
        already or on their way from somebody else."""
        if (link := self.links.get(key)) is None:
            return
        link.vector[author] = max(seq, link.vector.get(author, 0))
        if seq <= self.vector.get(author, 0) or not self.asking.pushed(key, author, seq, now):
            self.spare(key, author, seq)
        else:
            link.eager = (
                True  # it is where news comes from: both sides of a link of the tree push over it
            )
            self.asking.notice(key, {author: seq}, self.vector)

    def spare(self, key: str, author: str, seq: int) -> None:
        """This peer need not push that: it is told, and only announces what is new from then on."""
        if (link := self.links.get(key)) and len(link.spare) < MAX_SPARED:
            link.eager = False
            link.spare[author] = max(seq, link.spare.get(author, 0))

    def asked(self, key: str, author: str) -> None:
        """This peer wants updates of an author: it gets what is new at once from then on."""
        if link := self.links.get(key):
            link.eager = True
            link.spared.pop(author, None)

    def lacks(self, key: str, author: str, seq: int) -> bool:
        """Whether a linked peer, as far as we know, lacks an update and would have it from us."""
        link = self.links.get(key)
        return (
            link is not None and max(link.vector.get(author, 0), link.spared.get(author, 0)) < seq
        )

    def arriving(self, key: str, author: str, seq: int, now: float) -> None:
        """Bytes of an update have come from this peer."""
        if seq > self.vector.get(author, 0):
            self.asking.arriving(key, author, seq, now)

    def waiting(self, author: str, seq: int) -> None:
        """An update is whole here and waits for its author's earlier ones."""
        self.asking.waiting(author, seq)

    def failed(self, key: str, author: str, seq: int, now: float) -> None:
        """This peer cannot give us that update after all."""
        self.asking.failed(key, author, seq, now)

    def ban(self, author: str) -> None:
        self.asking.banned.add(author)

    def parting(self, key: str, now: float) -> None:
        """One side of this link said goodbye."""
        if link := self.links.get(key):
            link.leaving = link.leaving or now

    def ruled(
        self,
        vector: dict[str, int],
        clamped: Callable[[dict], dict],
        out: Callable[[str, int], bool],
        now: float,
    ) -> None:
        """A verdict took updates out: our ledger is at `vector` now, and of what peers have only `clamped` counts."""
        self.vector = dict(vector)
        for link in self.links.values():
            link.vector = clamped(link.vector)
            link.whole_at, link.stale = (
                now,
                True,
            )  # what no longer counts cannot be told as what changed
        self.asking.ruled(out)

    # ---- what is known

    @property
    def behind(self) -> int:
        """How many updates the peers have, taken together, that we lack."""
        best: dict[str, int] = {}
        for link in list(self.links.values()):  # other threads look too
            for author, seq in list(link.vector.items()):
                best[author] = max(seq, best.get(author, 0))
        return sum(max(0, seq - self.vector.get(author, 0)) for author, seq in best.items())

    @property
    def settled(self) -> bool:
        """Every linked peer publishes no more and has exactly what we have. True when there is none."""
        links = list(self.links.values())
        return all(link.spoke and link.complete and link.vector == self.vector for link in links)

    def overtaken(self, now: float) -> bool:
        """Whether what we lack next is kept by nobody we are linked to, and has not been for a while: only a snapshot
        helps."""
        return self.wanting and self.asking.overtaken(now)

    # ---- what follows

    def act(self, now: float) -> list[Action]:
        actions: list[Action] = [*self._pushes]
        self._pushes = []
        for link in list(self.links.values()):
            if now >= link.heard + SILENCE:
                actions.append(Drop(link.key, f"it said nothing for {SILENCE:.0f} seconds"))
                link.heard = now  # once is enough
            elif link.leaving is not None and now >= link.leaving + PARTING:
                actions.append(Drop(link.key, "it was told goodbye and does not go"))
                link.leaving = now
            if (
                now >= link.state_at
                or link.spare
                or (link.stale and now >= link.told + STATE_SOONEST)
            ):
                actions.append(TellState(link.key))
                link.told, link.stale = now, False
                link.state_at = now + STATE_EVERY * (0.75 + self._random.random() / 2)
            if now >= link.peers_at:
                link.peers_at = now + PEERS_EVERY
                if others := self.circle.others(link.key, self.links):
                    actions.append(TellPeers(link.key, others))
        for key in self.circle.surplus(self.links.values(), now):
            self.links[key].leaving = now
            actions.append(Goodbye(key))
        return (
            actions + [Dial(peer) for peer in self.circle.dials(self.links, now)] + self._asks(now)
        )

    def next_at(self, now: float) -> float:
        """When `act` is worth calling again if no fact comes in before."""
        times = [now + STATE_EVERY, self.asking.wake, self.circle.next_at(self.links, now)]
        for link in self.links.values():
            times += [link.heard + SILENCE, link.state_at, link.peers_at]
            if link.stale:
                times.append(link.told + STATE_SOONEST)
        times += [flight.deadline for flight in self.asking.flights.values()]
        return max(now, min(times))

    def tell(self, key: str, now: float) -> PeerState | None:
        """Our next State to this peer; what is in it counts as told. None once it is gone. Everything where it is time
        and a message can hold it; else what changed, or as much of it as a message holds."""
        if (link := self.links.get(key)) is None:
            return None
        whole = now >= link.whole_at
        every = self.vector if whole else link.changed
        some = [*every] if len(every) <= MAX_TOLD else self._random.sample(sorted(every), MAX_TOLD)
        stands, anchor = next(reversed(self.anchors.items()), (None, None))
        state = PeerState.model_construct(
            vector={author: self.vector[author] for author in some if author in self.vector},
            pruned={author: self.gone[author] for author in some if author in self.gone},
            full=whole and len(some) == len(every),
            declined=link.spare,
            links=len(self.links),
            anchor_vector=stands,
            anchor_digest=anchor,
            rate=self.rate,
            complete=self.complete,
        )
        if whole:
            link.whole_at = now + WHOLE_EVERY * (0.75 + self._random.random() / 2)
        for author in some:
            link.changed.pop(author, None)
        link.spare, link.stale = {}, bool(link.changed)
        return state

    def _compare(self, link: Linked) -> None:
        if link.stands and (ours := self.anchors.get(link.stands)):
            link.agrees = ours == link.anchor

    def some(self, count: int) -> list[tuple[str, int]]:
        """Some authors and their last updates here, ever others."""
        return self._random.sample(sorted(self.vector.items()), min(count, len(self.vector)))

    def _asks(self, now: float) -> list[Action]:
        """Neighbouring seqs asked of one peer become one question."""
        self.asking.lost(self.vector, now)
        asks: list[Action] = []
        for to, author, seq in (
            self.asking.asks(self.links, self.vector, now) if self.wanting else ()
        ):
            self.links[to].eager = True
            last = asks[-1] if asks else None
            if isinstance(last, AskFor) and (last.to, last.author, last.last) == (
                to,
                author,
                seq - 1,
            ):
                asks[-1] = AskFor(to, author, last.first, seq)
            else:
                asks.append(AskFor(to, author, seq, seq))
        return asks
