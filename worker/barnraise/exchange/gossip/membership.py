"""Whom to know, whom to be linked to and whom to let go: a bounded circle of links out of all peers heard of. Pure.

After HyParView (Leitão, Pereira and Rodrigues, DSN 2007), simpler: its active view are the links, its passive one is
`known`. A machine dials until it has WANTED links, and one more now and then, taken at random: a swarm that was cut in
two, each half content with itself, grows together again. Above MOST it says goodbye to some who have others; a peer
with few links is kept, for it may reach nobody else. What peers say of third ones is hearsay and never overrides what
a coordinator, or the peer itself, said.
"""

import math
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from barnraise.protocol.messages import Peer

WANTED = 8  # links we go and look for
MOST = 12  # links above which we let some go
FEW = 3  # links of a peer that is not let go: it may reach nobody else
SETTLED = 5.0  # seconds before a link may be let go
EXPLORE = 60.0  # seconds between two links more than WANTED, ± a half
LATER = 120.0  # who let us go, or was let go, is not dialled again this long
REDIAL_FIRST, REDIAL_MOST = 0.5, 30.0
POLITE = 0.7  # the larger key waits this long with its first dial, so that two do not dial each other at once
MAX_KNOWN = 1000
MAX_SPOKEN_OF = 32  # peers in one answer about others
FORGET_AFTER = 8  # failed dials of a peer that only other peers speak of


@dataclass
class Known:
    """A peer we have heard of. `vouched`: by a coordinator or by itself, not only by others."""

    addresses: tuple[str, ...]
    vouched: bool
    next_dial: float
    failures: int = 0


class Tie(Protocol):
    """What letting go looks at. `degree`: how many links the peer says it has; `leaving`: since when it is let go."""

    key: str
    since: float
    degree: int
    eager: bool
    leaving: float | None


class Circle:
    def __init__(self, key: str, seed: int):
        self.key = key
        self.known: dict[str, Known] = {}
        self._random = random.Random(seed)
        self._dialling: set[str] = set()
        self._explore = -math.inf  # when to look for one more

    # ---- facts

    def introduce(self, peers: Iterable[Peer], now: float, vouched: bool = True) -> None:
        """Peers to know of, from a coordinator or the peer itself (`vouched`), or hearsay, which never overrides."""
        for peer in peers:
            known = self.known.get(peer.key)
            if (
                peer.key == self.key
                or not peer.addresses
                or (known is None and not self._makes_room(vouched))
            ):
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
        if vouched and (
            least := next((key for key, known in self.known.items() if not known.vouched), None)
        ):
            del self.known[least]
            return True
        return False

    def met(self, key: str) -> None:
        """A link to it stands."""
        if known := self.known.get(key):
            known.failures = 0
        self._dialling.discard(key)

    def lost(self, key: str, now: float, let_go: bool) -> None:
        """The link to it is gone; `let_go`: one side had enough others."""
        if known := self.known.get(key):
            wait = LATER if let_go else REDIAL_FIRST
            known.next_dial = now + wait * (1 + self._random.random())

    def dial_failed(self, key: str, now: float, refused: bool = False) -> None:
        """Nobody answered, or it would not have us (`refused`: try rarely)."""
        self._dialling.discard(key)
        known = self.known.get(key)
        if known is None:
            return
        known.failures += 1
        if known.failures >= FORGET_AFTER and not known.vouched:
            del self.known[key]
            return
        wait = (
            REDIAL_MOST
            if refused
            else min(REDIAL_MOST, REDIAL_FIRST * 2 ** min(known.failures, 10))
        )
        known.next_dial = now + wait * (0.75 + self._random.random() / 2)

    # ---- what follows

    def dials(self, links: Collection[str], now: float) -> list[Peer]:
        """Whom to dial now."""
        room = self._room(links, now)
        if room <= 0:
            return []
        due = [key for key, known in self._unlinked(links) if known.next_dial <= now]
        self._random.shuffle(due)
        if len(links) < WANTED:
            due.sort(key=lambda key: not self.known[key].vouched)
        chosen = due[:room]
        self._dialling |= {*chosen}
        if chosen or now >= self._explore:
            self._explore = now + EXPLORE * (0.5 + self._random.random())
        return [Peer(key=key, addresses=list(self.known[key].addresses)) for key in chosen]

    def surplus(self, links: Collection[Tie], now: float) -> list[str]:
        """Whom to say goodbye to: at random, those first over whom no updates come."""
        over = len(links) - MOST - sum(link.leaving is not None for link in links)
        if over <= 0:
            return []
        able = [
            link
            for link in links
            if link.leaving is None and link.degree > FEW and now >= link.since + SETTLED
        ]
        self._random.shuffle(able)
        able.sort(key=lambda link: link.eager)
        return [link.key for link in able[:over]]

    def others(self, key: str, links: Collection[str]) -> tuple[Peer, ...]:
        """Some peers that are worth telling this one about: those we are linked to."""
        keys = [k for k in links if k != key and k in self.known]
        self._random.shuffle(keys)
        return tuple(
            Peer(key=k, addresses=list(self.known[k].addresses)) for k in keys[:MAX_SPOKEN_OF]
        )

    def next_at(self, links: Collection[str], now: float) -> float:
        """When `dials` is worth calling again."""
        if self._room(links, now) <= 0:
            return self._explore if now < self._explore and len(links) < MOST else math.inf
        return min((known.next_dial for _, known in self._unlinked(links)), default=math.inf)

    def _unlinked(self, links: Collection[str]) -> list[tuple[str, Known]]:
        return [
            (key, known)
            for key, known in self.known.items()
            if key not in links and key not in self._dialling
        ]

    def _room(self, links: Collection[str], now: float) -> int:
        if len(links) < WANTED:
            return WANTED - len(links) - len(self._dialling)
        return 1 - len(self._dialling) if now >= self._explore and len(links) < MOST else 0
