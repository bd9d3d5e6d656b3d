"""Membership of the overlay: which peers to know, which to dial and which links to close. Pure.

Follows HyParView (Leitão, Pereira and Rodrigues, DSN 2007, section 4), simplified: its active view
is the set of links, its passive view is `PartialView.passive`. A machine dials until it has
TARGET_LINKS links. Now and then it dials one more, chosen at random, so that two halves of a
partitioned swarm that are both content with their links grow together again. Above MAX_LINKS it
says goodbye to peers that have other links; peers with few links stay, because they may reach
nobody else.

What one peer reports about another is hearsay: it never overrides what a coordinator or the peer
itself reported.
"""

import math
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from barnraise.protocol.messages import Peer

TARGET_LINKS = 8  # a machine dials until it has this many links
MAX_LINKS = 12  # above this many links a machine closes some
MIN_LINKS = 3  # a peer with at most this many links is never asked to leave
MIN_LINK_AGE = 5.0  # seconds that a link lasts at least before this machine closes it
EXPLORE_INTERVAL = 60.0  # seconds between two links beyond TARGET_LINKS, ± a half
REDIAL_AFTER_GOODBYE = 120.0  # seconds before redialling a peer after a goodbye, up to twice that
REDIAL_MIN = 0.5  # seconds before the first redial after a failure or a lost link
REDIAL_MAX = 30.0  # seconds between two redials at most
TIE_BREAK_DELAY = 0.7  # seconds that the larger key waits, so that two peers do not dial each other
MAX_PASSIVE = 1000  # peers in the passive view
MAX_SHARED = 32  # peers in one message about others
MAX_HEARSAY_FAILURES = 8  # failed dials after which a peer known by hearsay alone is forgotten


@dataclass
class KnownPeer:
    """A peer of the passive view.

    Attributes:
        addresses: Where to dial it.
        vouched: Whether a coordinator or the peer itself reported it, not only other peers.
        next_dial: When it may be dialled next, in seconds.
        failures: Failed dials since it was last connected.
    """

    addresses: tuple[str, ...]
    vouched: bool
    next_dial: float
    failures: int = 0


class PeerLink(Protocol):
    """The part of a link that decides whether this machine closes it.

    Attributes:
        key: The peer's key.
        connected_at: When the link was established, in seconds.
        degree: How many links the peer reports to have.
        eager: Whether new updates are pushed over the link (see `gossip`).
        leaving_since: When one side said goodbye; None if neither did.
    """

    key: str
    connected_at: float
    degree: int
    eager: bool
    leaving_since: float | None


class PartialView:
    """The peers that one machine knows, and when to dial which of them.

    Args:
        key: This machine's own key.
        seed: Seed of the random choices.
    """

    def __init__(self, key: str, seed: int) -> None:
        self.key = key
        self.passive: dict[str, KnownPeer] = {}
        self._random = random.Random(seed)
        self._dialling: set[str] = set()
        self._explore_at = -math.inf  # when to look for one link beyond TARGET_LINKS

    # ---- events

    def add_peers(self, peers: Iterable[Peer], now: float, vouched: bool = True) -> None:
        """Add peers to the passive view, or update their addresses.

        Args:
            peers: The peers, each with its addresses.
            now: The time in seconds.
            vouched: Whether a coordinator or the peer itself reported them. Otherwise they are
                hearsay, which overrides only hearsay whose addresses have failed.
        """
        for peer in peers:
            if peer.key == self.key or not peer.addresses:
                continue
            known = self.passive.get(peer.key)
            if known is not None:
                self._update_peer(known, tuple(peer.addresses), now, vouched)
            elif self._make_room(vouched):
                delay = (
                    TIE_BREAK_DELAY * (1 + self._random.random()) if self.key > peer.key else 0.0
                )
                self.passive[peer.key] = KnownPeer(tuple(peer.addresses), vouched, now + delay)

    @staticmethod
    def _update_peer(
        known: KnownPeer, addresses: tuple[str, ...], now: float, vouched: bool
    ) -> None:
        replaces = vouched or (not known.vouched and known.failures > 0)
        if not replaces:
            return
        if addresses != known.addresses:
            known.failures = 0
            known.next_dial = min(known.next_dial, now + REDIAL_MIN)
        known.addresses = addresses
        known.vouched = vouched or known.vouched

    def _make_room(self, vouched: bool) -> bool:
        """Return whether one more peer fits, after removing one known by hearsay if necessary.

        Only a vouched peer displaces another. Without that, a peer that reports enough machines
        that do not exist would keep this machine from all that do.
        """
        if len(self.passive) < MAX_PASSIVE:
            return True
        if not vouched:
            return False
        hearsay = next((key for key, known in self.passive.items() if not known.vouched), None)
        if hearsay is None:
            return False
        del self.passive[hearsay]
        return True

    def on_connected(self, key: str) -> None:
        """Record that a link to this peer is established."""
        if known := self.passive.get(key):
            known.failures = 0
        self._dialling.discard(key)

    def on_disconnected(self, key: str, now: float, said_goodbye: bool) -> None:
        """Record that the link to this peer is gone.

        Args:
            key: The peer's key.
            now: The time in seconds.
            said_goodbye: Whether one side closed the link because it had enough others.
        """
        if known := self.passive.get(key):
            delay = REDIAL_AFTER_GOODBYE if said_goodbye else REDIAL_MIN
            known.next_dial = now + delay * (1 + self._random.random())

    def on_dial_failed(self, key: str, now: float, refused: bool = False) -> None:
        """Record that a dial failed and schedule the next one, with exponential backoff.

        Args:
            key: The peer's key.
            now: The time in seconds.
            refused: Whether the peer answered and refused the link; it is then dialled only rarely.
        """
        self._dialling.discard(key)
        known = self.passive.get(key)
        if known is None:
            return
        known.failures += 1
        if known.failures >= MAX_HEARSAY_FAILURES and not known.vouched:
            del self.passive[key]
            return
        delay = REDIAL_MAX
        if not refused:
            delay = min(REDIAL_MAX, REDIAL_MIN * 2 ** min(known.failures, 10))
        known.next_dial = now + delay * (0.75 + self._random.random() / 2)

    # ---- decisions

    def choose_dials(self, links: Collection[str], now: float) -> list[Peer]:
        """Choose the peers to dial now and mark them as being dialled.

        Args:
            links: Keys of the peers that are connected.
            now: The time in seconds.
        """
        room = self._count_dials(links, now)
        if room <= 0:
            return []
        due = [key for key, known in self._unlinked(links) if known.next_dial <= now]
        self._random.shuffle(due)
        if len(links) < TARGET_LINKS:
            due.sort(key=lambda key: not self.passive[key].vouched)
        chosen = due[:room]
        self._dialling |= {*chosen}
        if chosen or now >= self._explore_at:
            self._explore_at = now + EXPLORE_INTERVAL * (0.5 + self._random.random())
        return [Peer(key=key, addresses=list(self.passive[key].addresses)) for key in chosen]

    def choose_goodbyes(self, links: Collection[PeerLink], now: float) -> list[str]:
        """Choose the peers to say goodbye to: at random, peers on lazy links first."""
        excess = len(links) - MAX_LINKS - sum(link.leaving_since is not None for link in links)
        if excess <= 0:
            return []
        candidates = [
            link
            for link in links
            if link.leaving_since is None
            and link.degree > MIN_LINKS
            and now >= link.connected_at + MIN_LINK_AGE
        ]
        self._random.shuffle(candidates)
        candidates.sort(key=lambda link: link.eager)
        return [link.key for link in candidates[:excess]]

    def peers_to_share(self, key: str, links: Collection[str]) -> tuple[Peer, ...]:
        """Return some connected peers that the peer `key` may want to know."""
        keys = [other for other in links if other != key and other in self.passive]
        self._random.shuffle(keys)
        return tuple(
            Peer(key=other, addresses=list(self.passive[other].addresses))
            for other in keys[:MAX_SHARED]
        )

    def next_wakeup(self, links: Collection[str], now: float) -> float:
        """Return when `choose_dials` is worth calling again, in seconds; inf if no time is."""
        if self._count_dials(links, now) <= 0:
            may_explore = now < self._explore_at and len(links) < MAX_LINKS
            return self._explore_at if may_explore else math.inf
        return min((known.next_dial for _, known in self._unlinked(links)), default=math.inf)

    def _unlinked(self, links: Collection[str]) -> list[tuple[str, KnownPeer]]:
        """Return the known peers that are neither connected nor being dialled."""
        return [
            (key, known)
            for key, known in self.passive.items()
            if key not in links and key not in self._dialling
        ]

    def _count_dials(self, links: Collection[str], now: float) -> int:
        """Return how many more peers may be dialled now; not positive if none."""
        if len(links) < TARGET_LINKS:
            return TARGET_LINKS - len(links) - len(self._dialling)
        explores = now >= self._explore_at and len(links) < MAX_LINKS
        return 1 - len(self._dialling) if explores else 0
