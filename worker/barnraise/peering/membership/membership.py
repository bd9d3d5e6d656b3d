"""Membership of the overlay: which peers to know, which to dial and which links to close. Pure.

Follows HyParView (Leitão, Pereira and Rodrigues, DSN 2007, section 4): its active view is the set
of links, its passive view is `PartialView.passive`. What HyParView does not have is a defence
against peers that lie, and against one person with many keys:

* The links of one volunteer are limited: two, whatever the number of that volunteer's keys.
* Peers are known from three sources, each with room of its own, which are dialled in turn. Some
  links are always ones that this machine dialled: who connects is the choice of others.
* The two oldest links, some of those that it dialled and one to a peer that states a fast uplink
  are never closed for newer ones.
* Now and then it dials one more peer, chosen at random, however many links it has. So two halves of
  a partitioned swarm that are both content with their links grow together again.
* Nothing that a peer reports about itself counts: not its links, not its addresses. What a peer
  reports about others is hearsay: it overrides nothing, and each volunteer's reports have a bound.

All times are in seconds.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from barnraise.peering.addresses.addresses import host_of, parse_address
from barnraise.peering.limits.back_off import BackOff
from barnraise.peering.limits.dial_limits import DialLimits
from barnraise.peering.membership.hole_punching import Rendezvous
from barnraise.peering.membership.link_targets import LINK_TARGETS
from barnraise.protocol.messages import Peer
from barnraise.protocol.mirror_list import is_relay_url
from barnraise.protocol.types import MAX_ADDRESSES

GOODBYE_REDIAL_SECONDS = 120.0  # before redialling a peer after a goodbye, up to twice that
# Before redialling a peer, up to twice that: the first pause after a lost link; the longest one if
# it refuses links again and again, or said goodbye to a machine that needs links.
REDIAL = BackOff(0.5, 30.0)
TIE_BREAK_SECONDS = 0.7  # that the larger key waits, so that two peers do not dial each other
MAX_SHARED = 32  # peers in one message about others
MAX_REPORTED = 64  # peers of the passive view that one volunteer's machines reported
MAX_FRIENDS_OF_VOLUNTEER = 4  # machines of one other person that are remembered as friends
RELAY_AFTER = 2  # dials without an answer after which a peer's relay is tried
RELAY_REDIAL = BackOff(30.0, 1800.0)  # between two dials through a relay
MAX_SILENT_DIALS = 8  # dials without an answer after which a peer that was never met is forgotten


class PeerSource(Enum):
    """From where a machine knows a peer."""

    SITE = "site"  # a coordinator named it
    FRIEND = "friend"  # it has been linked, now or earlier
    GOSSIP = "gossip"  # another peer reported it


# How many peers of each source the passive view holds.
MAX_PASSIVE_PEERS = {PeerSource.SITE: 500, PeerSource.FRIEND: 200, PeerSource.GOSSIP: 300}


@dataclass
class KnownPeer:
    """A peer of the passive view.

    Attributes:
        addresses: Where to dial it, the address at which it was met first.
        source: From where this machine knows it.
        next_dial: When it may be dialled next at the earliest, in seconds.
        volunteer: Digest of its volunteer, once it has shown its ticket.
        reporter: Digest of the volunteer whose machine reported it; only of hearsay.
        met_at: The address at which it was met; empty if that is unknown.
        failures: Dials in a row that it did not answer.
        refusals: Links in a row that it, or this machine, refused.
        relay: URL of its relay; empty if none is known.
    """

    addresses: tuple[str, ...]
    source: PeerSource
    next_dial: float
    volunteer: str = ""
    reporter: str = ""
    met_at: str = ""
    failures: int = 0
    refusals: int = 0
    relay: str = ""


@dataclass(frozen=True)
class Meeting:
    """How a link came about: facts that the handshake proves, and what the peer claims.

    Attributes:
        volunteer: Digest of the peer's volunteer; empty: the peer counts as a volunteer of its own.
        dialled: Whether this machine dialled.
        address: The peer's address as this machine sees it; empty if that is unknown.
        claimed: The addresses that the peer reports of itself. Only those of the host at which it
            was met are believed.
        newcomer: Whether the peer's ticket is a newcomer's.
    """

    volunteer: str = ""
    dialled: bool = False
    address: str = ""
    claimed: tuple[str, ...] = ()
    newcomer: bool = False


class PeerLink(Protocol):
    """The part of a link that decides whether this machine closes it.

    Attributes:
        key: The peer's key.
        connected_at: When the link was established, in seconds.
        meeting: How the link came about.
        eager: Whether new updates are pushed over the link (see `gossip`).
        is_fast: Whether the peer states an uplink far above this machine's.
        leaving_since: When one side said goodbye; None if neither did.
    """

    key: str
    connected_at: float
    meeting: Meeting
    eager: bool
    is_fast: bool
    leaving_since: float | None


Links = Mapping[str, PeerLink]


class PartialView:
    """The peers that one machine knows, and when to dial which of them.

    Attributes:
        key: This machine's own key.
        volunteer: Digest of this machine's own volunteer.
        passive: The known peers by key.
        rendezvous: Whom to ask for help with dials that are not answered.
    """

    def __init__(self, key: str, seed: int, volunteer: str = "") -> None:
        self.key = key
        self.volunteer = volunteer
        self.passive: dict[str, KnownPeer] = {}
        self._random = random.Random(seed)
        self.rendezvous = Rendezvous(seed)
        self._limits = DialLimits(self._random.random)
        self._dialling: dict[str, tuple[str, ...]] = {}  # key → the addresses that are tried
        self._sources = [*PeerSource]  # in the order of their turns to be dialled
        self._explore_at = -math.inf  # when to look for one link beyond those wanted
        self._link_count = 0  # at the last look
        self._volunteer_count = 0  # volunteers among these links
        self._most = LINK_TARGETS.most
        self._wanted = LINK_TARGETS.wanted

    def set_carrying(self, carries: bool, now: float) -> None:
        """Want many links from now on if this machine can pass on updates for many slower ones.

        Slow lines serve the peers that are not linked to it. So it dials at once who said goodbye.
        """
        if carries and self._wanted < LINK_TARGETS.of_carrier:
            self._most = self._wanted = LINK_TARGETS.of_carrier
            self._hasten_redials(now)

    # ---- events: what others report

    def add_peers(
        self,
        peers: Iterable[Peer],
        now: float,
        source: PeerSource = PeerSource.SITE,
        reporter: str = "",
    ) -> None:
        """Add peers to the passive view, or update their addresses.

        Args:
            peers: The peers, each with its addresses.
            now: The time in seconds.
            source: Who reports them. Hearsay overrides only hearsay whose addresses have failed.
            reporter: Digest of the volunteer whose machine reports them; only of hearsay.
        """
        for peer in peers:
            if peer.key == self.key or not peer.addresses:
                continue
            relay = next(filter(is_relay_url, peer.addresses), "")
            direct = [address for address in peer.addresses if not is_relay_url(address)]
            addresses = tuple(dict.fromkeys(direct))[:MAX_ADDRESSES]
            known = self.passive.get(peer.key)
            if known is not None:
                self._update_peer(known, addresses, now, source)
                if source is not PeerSource.GOSSIP or not known.relay:
                    known.relay = relay or known.relay
            elif self._make_room(source, reporter):
                delay = (
                    TIE_BREAK_SECONDS * (1 + self._random.random()) if self.key > peer.key else 0.0
                )
                self.passive[peer.key] = KnownPeer(
                    addresses, source, now + delay, reporter=reporter, relay=relay
                )

    @staticmethod
    def _update_peer(
        known: KnownPeer, addresses: tuple[str, ...], now: float, source: PeerSource
    ) -> None:
        is_hearsay = source is PeerSource.GOSSIP
        if is_hearsay and (known.source is not PeerSource.GOSSIP or not known.failures):
            return
        if known.met_at:
            addresses = (known.met_at, *(at for at in addresses if at != known.met_at))
        if addresses != known.addresses:
            known.next_dial = min(known.next_dial, now + REDIAL.first_seconds)
        known.addresses = addresses[:MAX_ADDRESSES]
        if known.source is PeerSource.GOSSIP:
            known.source = source

    def _make_room(self, source: PeerSource, reporter: str) -> bool:
        """Return whether one more peer of a source fits, after forgetting another if necessary.

        Each source has its own room: whatever one source reports, the others' peers stay.
        """
        if source is PeerSource.GOSSIP:
            reported = [k for k, known in self._of_source(source) if known.reporter == reporter]
            if len(reported) >= MAX_REPORTED:
                del self.passive[reported[0]]
        of_source = self._of_source(source)
        if len(of_source) < MAX_PASSIVE_PEERS[source]:
            return True
        if source is PeerSource.GOSSIP:
            counts = Counter(known.reporter for _, known in of_source)
            busiest = counts.most_common(1)[0][0]
            of_source = [(key, known) for key, known in of_source if known.reporter == busiest]
        unused = [key for key, _ in of_source if key not in self._dialling]
        if unused:
            del self.passive[unused[0]]
        return bool(unused)

    def _of_source(self, source: PeerSource) -> list[tuple[str, KnownPeer]]:
        return [(key, known) for key, known in self.passive.items() if known.source is source]

    # ---- events: links

    def on_connected(self, key: str, now: float, meeting: Meeting) -> None:
        """Record that a link to this peer is established."""
        self._end_dial(key, meeting, now)
        self.rendezvous.on_connected(key)
        known = self.passive.get(key)
        addresses = tuple(
            at
            for at in meeting.claimed
            if meeting.address and host_of(at) == host_of(meeting.address)
        )
        if meeting.address:
            addresses = (meeting.address, *(at for at in addresses if at != meeting.address))
        if known is None:
            if not addresses or not self._make_room(PeerSource.FRIEND, ""):
                return
            known = self.passive[key] = KnownPeer(addresses, PeerSource.FRIEND, now)
        elif addresses:
            named = known.addresses if known.source is PeerSource.SITE else ()
            known.addresses = tuple(dict.fromkeys((*addresses, *named)))[:MAX_ADDRESSES]
            if known.source is PeerSource.GOSSIP and self._make_room(PeerSource.FRIEND, ""):
                known.source = PeerSource.FRIEND
        known.met_at = meeting.address
        known.volunteer = meeting.volunteer
        known.failures = 0
        known.refusals = 0
        self._limit_friends(key, known)

    def _limit_friends(self, key: str, known: KnownPeer) -> None:
        """Forget the oldest friends of a person whose machines are more than a few."""
        if not known.volunteer or known.volunteer == self.volunteer:
            return
        others = [
            other
            for other, friend in self._of_source(PeerSource.FRIEND)
            if friend.volunteer == known.volunteer and other != key
        ]
        for other in others[: max(0, len(others) - MAX_FRIENDS_OF_VOLUNTEER + 1)]:
            del self.passive[other]

    def on_disconnected(self, key: str, now: float, said_goodbye: bool) -> None:
        """Record that the link is gone; `said_goodbye` if one side had enough other links."""
        if known := self.passive.get(key):
            delay = REDIAL.first_seconds
            if said_goodbye:
                needs_links = self._volunteer_count < self._wanted
                delay = REDIAL.most_seconds if needs_links else GOODBYE_REDIAL_SECONDS
            known.next_dial = now + delay * (1 + self._random.random())

    def on_dial_failed(self, key: str, now: float) -> None:
        """Record that nobody answered a dial; its addresses back off."""
        self.rendezvous.on_dial_failed(key, now)
        dialled = self._dialling.pop(key, None)
        if dialled is not None:
            self._limits.on_silence(dialled, now, not self._link_count)
        known = self.passive.get(key)
        if known is None:
            return
        known.failures += 1
        if known.relay and known.failures > RELAY_AFTER:
            wait = RELAY_REDIAL.pause_seconds(known.failures - RELAY_AFTER - 1)
            known.next_dial = max(known.next_dial, now + wait)
        was_met = known.source is PeerSource.FRIEND or known.met_at
        if known.failures >= MAX_SILENT_DIALS and not was_met:
            del self.passive[key]
        elif dialled is None:
            known.next_dial = now + REDIAL.most_seconds

    def on_refused(self, key: str, now: float, meeting: Meeting) -> None:
        """Record that one of the two sides refused a link after the peer's key was proven.

        The meeting is how the link would have come about, as far as that is known.
        """
        self._end_dial(key, meeting, now)
        if known := self.passive.get(key):
            known.volunteer = meeting.volunteer or known.volunteer
            known.failures = 0
            known.refusals = min(known.refusals + 1, 20)
            delay = REDIAL.pause_seconds(known.refusals)
            known.next_dial = max(known.next_dial, now + delay * (1 + self._random.random()))

    def on_dial_needless(self, key: str) -> None:
        """Record that a dial was given up because the peer has connected meanwhile."""
        self.rendezvous.on_dial_ended(key)
        self._dialling.pop(key, None)

    def _end_dial(self, key: str, meeting: Meeting, now: float) -> None:
        if not meeting.dialled:
            return
        self.rendezvous.on_dial_ended(key)
        dialled = self._dialling.pop(key, None)
        if dialled is not None and meeting.address:
            self._limits.on_answer(dialled, meeting.address, now)

    # ---- decisions

    def has_room_for(self, links: Links, key: str, volunteer: str) -> bool:
        """Return whether a link to one more machine of this volunteer is allowed."""
        if not volunteer:
            return True
        others = sum(
            link.meeting.volunteer == volunteer
            for link in links.values()
            if link.key != key and link.leaving_since is None
        )
        return others < self._max_links(volunteer)

    def _max_links(self, volunteer: str) -> int:
        """Return how many links to machines of one volunteer are allowed."""
        if not volunteer:
            return self._most
        if volunteer == self.volunteer:
            return LINK_TARGETS.most_of_siblings
        return LINK_TARGETS.most_of_volunteer

    def choose_dials(self, links: Links, now: float) -> list[Peer]:
        """Choose the peers to dial now and record that they are being dialled."""
        self._link_count = len(links)
        self._volunteer_count = len({link.meeting.volunteer or key for key, link in links.items()})
        if self._volunteer_count < LINK_TARGETS.least_volunteers:
            self._hasten_redials(now)
        room = self._count_dials(links, now)
        if room <= 0:
            return []
        volunteers = self._count_volunteers(links)
        candidates = self._list_candidates(links, now)
        chosen: list[Peer] = []
        while len(chosen) < room and any(candidates.values()):
            source = next(source for source in self._sources if candidates[source])
            key = candidates[source].pop()
            known = self.passive[key]
            is_full = volunteers[known.volunteer] >= self._max_links(known.volunteer)
            if known.volunteer and is_full:
                continue
            addresses = self._limits.choose(known.addresses, now)
            relays = [known.relay] if known.relay and known.failures >= RELAY_AFTER else []
            if not (addresses or relays):
                ready_at = (self._limits.ready_at(at, now) for at in known.addresses)
                known.next_dial = min(ready_at, default=now + REDIAL.most_seconds)
                continue
            self._limits.on_dial(addresses, now)
            self._dialling[key] = addresses
            self.rendezvous.on_dial(key, now)
            # A source that names peers which do not exist must not delay the others.
            self._sources.remove(source)
            self._sources.append(source)
            volunteers[known.volunteer] += 1
            chosen.append(Peer(key=key, addresses=[*addresses, *relays]))
        if chosen or now >= self._explore_at:
            self._explore_at = now + LINK_TARGETS.explore_seconds * (0.5 + self._random.random())
        return chosen

    def choose_punch(
        self, key: str, addresses: Sequence[str], links: Links, now: float
    ) -> Peer | None:
        """Choose where to dial a peer that asks for it, and record that it is being dialled.

        The addresses are as the peer states them, the most promising first.
        Addresses that did not answer before may do so now that the peer dials as well: their
        backoff does not count, the budgets of their hosts and networks do.

        Returns:
            None if it is linked, or there is no room for it, or no address may be dialled now.
        """
        staying = [link for link in links.values() if link.leaving_since is None]
        if key == self.key or key in links or len(staying) >= self._most:
            return None
        known = self.passive.get(key)
        if known is not None and known.volunteer:
            others = self._count_volunteers(links)[known.volunteer]
            if others >= self._max_links(known.volunteer):
                return None
        relay = next(filter(is_relay_url, addresses), "")
        if known is not None and relay:
            known.relay = relay
        usable = [parse_address(address) for address in addresses]
        met_at = [known.met_at] if known is not None and known.met_at else []
        candidates = [*dict.fromkeys([*filter(None, usable), *met_at])]
        chosen = self._limits.choose_punched(candidates, now)
        if not chosen:
            return None
        self._limits.on_dial(chosen, now)
        dialled = self._dialling.get(key, ())
        self._dialling[key] = tuple(dict.fromkeys((*dialled, *chosen)))
        return Peer(key=key, addresses=list(self._dialling[key])[:MAX_ADDRESSES])

    def choose_probe(self, addresses: Sequence[str], now: float) -> tuple[str, ...]:
        """Return at which of a machine's addresses to probe it, and charge their budgets.

        They are host:port pairs of one host. A probe is charged like a dial that nobody answers.
        """
        chosen = self._limits.choose_punched(addresses, now)
        self._limits.on_dial(chosen, now)
        return chosen

    def list_met(self) -> list[str]:
        """Return the keys of peers that this machine dials now or has met, the newest first."""
        met = [key for key, known in self.passive.items() if known.met_at or known.failures]
        return [*self._dialling, *reversed(met)]

    def _hasten_redials(self, now: float) -> None:
        """Dial soon who only said goodbye, because few people are linked.

        A few volunteers could otherwise be the only ones that a machine hears of, for as long as
        the others need not be dialled.
        """
        for known in self.passive.values():
            if known.met_at and not known.failures and not known.refusals:
                soon = now + REDIAL.first_seconds * (1 + self._random.random())
                known.next_dial = min(known.next_dial, soon)

    def _list_candidates(self, links: Links, now: float) -> dict[PeerSource, list[str]]:
        """Return the keys that may be dialled now by source, the last to be used first.

        Peers that were met come first, then those that have failed least, in random order: most
        peers may be behind routers, and the few others must not wait for their repeated dials.
        Hearsay alternates between its reporters: one that reports much is not dialled more.
        """
        due = [key for key, known in self._list_unlinked(links) if known.next_dial <= now]
        self._random.shuffle(due)
        due.sort(key=self._count_failures, reverse=True)
        candidates: dict[PeerSource, list[str]] = {source: [] for source in PeerSource}
        turns: Counter[str] = Counter()
        order: dict[str, int] = {}
        for key in reversed(due):
            known = self.passive[key]
            order[key] = turns[known.reporter]
            turns[known.reporter] += 1
        for key in due:
            candidates[self.passive[key].source].append(key)
        candidates[PeerSource.GOSSIP].sort(key=lambda key: -order[key])
        return candidates

    def _count_failures(self, key: str) -> int:
        known = self.passive[key]
        return 0 if known.met_at else known.failures

    def choose_goodbyes(self, links: Links, now: float) -> list[str]:
        """Choose the peers to say goodbye to.

        The newest links go where a volunteer has too many. Beyond the most that a machine
        has, links go at random, lazy ones first; the oldest links and the oldest dialled ones stay.
        """
        staying = sorted(
            (link for link in links.values() if link.leaving_since is None),
            key=lambda link: link.connected_at,
        )
        counts: Counter[str] = Counter()
        goodbyes: list[str] = []
        allowed: list[PeerLink] = []
        for link in staying:
            volunteer = link.meeting.volunteer
            counts[volunteer] += 1
            if volunteer and counts[volunteer] > self._max_links(volunteer):
                goodbyes.append(link.key)
            else:
                allowed.append(link)
        excess = len(allowed) - self._most
        if excess <= 0:
            return goodbyes
        dialled = [link.key for link in allowed if link.meeting.dialled]
        oldest = {link.key for link in allowed[: LINK_TARGETS.oldest]}
        fast = [link.key for link in allowed if link.is_fast]
        protected = oldest | set(dialled[: LINK_TARGETS.least_dialled]) | set(fast[:1])
        newest_at = now - LINK_TARGETS.least_age_seconds
        candidates = [
            link for link in allowed if link.key not in protected and link.connected_at <= newest_at
        ]
        self._random.shuffle(candidates)
        candidates.sort(key=lambda link: link.eager)
        return goodbyes + [link.key for link in candidates[:excess]]

    def peers_to_share(self, key: str, links: Links) -> tuple[Peer, ...]:
        """Return some connected peers that the peer `key` may want to know.

        Each is named with the address at which this machine met it, never with one that it reports
        of itself.
        """
        keys = [
            other
            for other in links
            if other != key and other in self.passive and self.passive[other].met_at
        ]
        self._random.shuffle(keys)
        return tuple(
            Peer(key=other, addresses=[self.passive[other].met_at]) for other in keys[:MAX_SHARED]
        )

    def list_peers(self) -> list[Peer]:
        """Return all known peers, with the addresses at which to dial them."""
        peers: list[Peer] = []
        for key, known in self.passive.items():
            relays = [known.relay] if known.relay else []
            direct = known.addresses[: MAX_ADDRESSES - len(relays)]
            peers.append(Peer(key=key, addresses=[*direct, *relays]))
        return peers

    def choose_mesh_dial(self, peer: Peer, now: float) -> Peer | None:
        """Choose where the mesh dials a peer, and record that it does; None if it has to wait.

        Every machine of a mesh dials every other one, and most of their addresses are hearsay: the
        limits of all other dials hold.
        """
        relays = [address for address in peer.addresses if is_relay_url(address)]
        direct = [address for address in peer.addresses if address not in relays]
        addresses = self._limits.choose(direct, now)
        if not (addresses or relays):
            return None
        self._limits.on_dial(addresses, now)
        return Peer(key=peer.key, addresses=[*addresses, *relays])

    def on_mesh_dial_ended(self, dialled: Peer, answered: str, now: float) -> None:
        """Record at which address the peer proved its key to the mesh; "" if it did at none.

        A proven address where no mesh answers is one of a machine that does not average yet.
        """
        direct = [address for address in dialled.addresses if not is_relay_url(address)]
        if answered in direct:
            self._limits.on_answer(direct, answered, now)
        elif not answered:
            silent = [address for address in direct if not self._limits.is_proven(address)]
            self._limits.on_silence(silent, now, not self._link_count)

    def next_wakeup(self, links: Links, now: float) -> float:
        """Return when to choose dials and requests again, in seconds; inf if no time is."""
        next_request = self.rendezvous.next_wakeup(links)
        if self._count_dials(links, now) <= 0:
            return min(next_request, self._explore_at if now < self._explore_at else math.inf)
        volunteers = self._count_volunteers(links)
        next_dial = min(
            (
                known.next_dial
                for _, known in self._list_unlinked(links)
                if not known.volunteer
                or volunteers[known.volunteer] < self._max_links(known.volunteer)
            ),
            default=math.inf,
        )
        return min(next_request, next_dial)

    def _list_unlinked(self, links: Links) -> list[tuple[str, KnownPeer]]:
        """Return the known peers that are neither connected nor being dialled."""
        return [
            (key, known)
            for key, known in self.passive.items()
            if key not in links and key not in self._dialling
        ]

    @staticmethod
    def _count_volunteers(links: Links) -> Counter[str]:
        return Counter(link.meeting.volunteer for link in links.values())

    def _count_dials(self, links: Links, now: float) -> int:
        """Return how many more peers may be dialled now; not positive if none."""
        staying = [link for link in links.values() if link.leaving_since is None]
        dialled = sum(link.meeting.dialled for link in staying)
        wanted = max(self._wanted - len(staying), LINK_TARGETS.least_dialled - dialled)
        if wanted <= 0 and now >= self._explore_at:
            wanted = 1
        return wanted - len(self._dialling)
