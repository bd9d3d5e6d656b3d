"""Gossip: which peer to send what, which updates are missing and which peer to ask for them. Pure.

A state machine: events enter through methods, each with the time; `next_actions(now)` returns the
actions that they call for, and `next_wakeup(now)` returns when to call it again. It has no socket,
clock or thread, so that a test simulates a thousand peers in one loop.

New updates spread along a tree, after Plumtree (Leitão, Pereira and Rodrigues, "Epidemic Broadcast
Trees", SRDS 2007). An update is pushed over eager links, and only announced over lazy ones, in the
next State. A peer that receives a push which it already has, or which another peer is sending it,
declines it, and that link is lazy from then on for updates of the same machine: after a while every
update reaches every peer exactly once. Each machine's updates have a tree of their own: a stranger
that sends its updates to everybody, and relays nothing, must not make the links lazy over which the
others' updates travel. A peer that learns of an update which does not arrive requests it from a
peer that announced it, and that link is eager again: a tree that is cut repairs itself. Below the
tree works anti-entropy: each State contains what changed since the last one, and at intervals
everything.

Where a linked peer has a much faster uplink than this machine, that peer carries (see `carriers`):
this machine's own updates are pushed to it alone, and what it has of others' updates is only
announced to the rest.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from barnraise.exchange.gossip.agreement import (
    Votes,
    count_each_alike,
    majority_vector,
)
from barnraise.exchange.gossip.authors import (
    MAX_CLAIMS_WHILE_JOINING,
    AuthorClaim,
    AuthorRegister,
)
from barnraise.exchange.gossip.carriers import Carriers
from barnraise.exchange.gossip.link_state import LinkState
from barnraise.exchange.gossip.requests import RequestScheduler
from barnraise.exchange.gossip.state_intervals import STATE_INTERVALS
from barnraise.ledger.verdict_set import VerdictSet
from barnraise.peering.limits.timeouts import TIMEOUTS
from barnraise.peering.membership.link_actions import (
    CloseLink,
    Dial,
    LinkAction,
    SendGoodbye,
    SendPeers,
)
from barnraise.peering.membership.membership import Meeting, PartialView
from barnraise.planning.uplink_budget import STATE_SHARE
from barnraise.protocol.messages import PeerState
from barnraise.protocol.table_sizes import FEW, MANY, store_newest
from barnraise.protocol.types import MAX_UPLINK

STATE_BYTES = 600.0  # of a State of a few authors, with the transport's own bytes
MIN_EAGER_LINKS = 3  # links that are eager before it is known which deliver updates first
MAX_STATE_AUTHORS = 1100  # authors in one State: with `pruned`, as much as a header holds
MAX_DECLINED = 200  # pushes declined in one State
RATE_TOLERANCE = 0.2  # relative change of the training rate that need not be sent at once
MAX_ANCHOR_DIGESTS = 16  # of our anchors, compared with peers that reach the same vector later


@dataclass(frozen=True)
class SendState:
    """Send a State to this peer; `Gossip.build_state` builds it once it can be sent."""

    to: str


@dataclass(frozen=True)
class PushUpdate:
    """Send this update to a peer that has not requested it."""

    to: str
    author: str
    seq: int


@dataclass(frozen=True)
class RequestUpdates:
    """Request an author's updates `first` to `last` from this peer."""

    to: str
    author: str
    first: int
    last: int


@dataclass(frozen=True)
class ProbeAuthor:
    """Request from this peer the signed header of an update that it claims an author published."""

    to: str
    author: str
    seq: int


Action = LinkAction | SendState | PushUpdate | RequestUpdates | ProbeAuthor


class Gossip:
    """The gossip state machine of one machine.

    Attributes:
        key: This machine's own key.
        volunteer: Digest of this machine's own volunteer.
        vector: Author → sequence number of the last update in our ledger.
        pruned: Author → sequence number up to which our ledger has no payloads.
        wants_updates: Whether missing updates are requested; False while a snapshot is being
            fetched.
        rate: Tokens per second at which this machine trains.
        complete: Whether this machine will publish no further updates.
        anchor_digests: Digest of a version vector → digest of our anchor there, for the last few
            vectors.
        links: The connected peers by key.
        ended: The peers whose links are gone and who had said that they publish no further update
            (an ordered set).
        authors: The authors that exist for this machine.
        membership: The peers that this machine knows.
        requests: The updates that are missing or on their way.
        carriers: The peers that pass this machine's updates on.
        relays: Whether this machine passes on others' updates before they are requested.
        carrier_rate: Bytes per second of the uplink of the peer that carries this machine's
            updates, as far as it counts; inf: there is none.
    """

    def __init__(self, key: str, seed: int, volunteer: str = "", relays: bool = True) -> None:
        """Create the state machine without links; `seed` decides its random choices."""
        self.key = key
        self.volunteer = volunteer or key
        self.vector: dict[str, int] = {}
        self.pruned: dict[str, int] = {}
        self.wants_updates = False
        self.rate = 0.0
        self.complete = False
        self.anchor_digests: dict[str, str] = {}
        self.links: dict[str, LinkState] = {}
        self.ended: dict[str, None] = {}
        self.authors = AuthorRegister()
        self.membership = PartialView(key, seed, volunteer)
        self.requests = RequestScheduler(seed)
        self._clamp: Callable[[dict[str, int]], dict[str, int]] = dict
        self.relays = relays
        self.carrier_rate = math.inf
        self.carriers = Carriers()
        self._pushes: list[PushUpdate] = []
        # Author and seq of this machine's updates that are not on their way yet.
        self._fresh: list[tuple[str, int]] = []
        self._random = random.Random(seed)
        self.set_uplink(math.inf)

    # ---- events: this machine

    def set_uplink(self, allowed: float, measured: float = 0.0) -> None:
        """Set the bytes per second that this machine may send, and that its line carries.

        Args:
            allowed: by the volunteer; inf: any.
            measured: while something was sent; 0: not known.
        """
        self._allowed_uplink = allowed
        self._own_uplink = min(allowed, measured or math.inf)

    def start(self, vector: dict[str, int], pruned: dict[str, int], now: float) -> None:
        """Start, or start again, from what the ledger holds; request missing updates since."""
        self.vector = dict(vector)
        self.pruned = dict(pruned)
        self.wants_updates = True
        self.requests.reset()
        self.anchor_digests = {}
        for author in vector:
            self._adopt_claims(author)
        for link in self.links.values():
            link.anchor_agrees = None
            link.next_full_state_at = now
            link.has_news = True
            self.requests.on_vector(link.key, link.vector, self.vector)

    def restore(self, vector: dict[str, int]) -> None:
        """Publish what the ledger has, without requesting updates yet."""
        self.vector = dict(vector)

    def pause_requests(self) -> None:
        """Request no updates until the next `start`."""
        self.wants_updates = False

    def set_progress(self, rate: float, complete: bool) -> None:
        """Publish this machine's rate in tokens per second, and whether it is complete."""
        if self.progress_changed(rate, complete):
            self.rate = rate
            self.complete = complete
            for link in self.links.values():
                link.has_news = True

    def progress_changed(self, rate: float, complete: bool) -> bool:
        """Return whether this progress is worth publishing. Safe to call from another thread."""
        rate_changed = abs(rate - self.rate) > RATE_TOLERANCE * self.rate
        return complete != self.complete or rate_changed

    def update_rate(self, rate: float) -> None:
        """Publish this rate with the next States. Safe to call from another thread."""
        self.rate = rate

    def on_anchor_digest(self, vector: str, anchor: str) -> None:
        """Record the digest of our anchor at a version vector, which is named by its digest."""
        if self.anchor_digests.get(vector) != anchor:
            digests = [*self.anchor_digests.items(), (vector, anchor)]
            self.anchor_digests = dict(digests[-MAX_ANCHOR_DIGESTS:])
            for link in self.links.values():
                self._compare_anchors(link)

    def on_local_update(self, author: str, seq: int, is_urgent: bool = True) -> None:
        """Record that our ledger has this author's updates up to `seq`, and schedule their spread.

        Peers that need an urgent update are pushed it, or sent a State soon. The other peers see it
        in their next State, which is sent soon only if one of the two sides is about to end.
        """
        if self._clamp({author: seq}).get(author, 0) < seq:
            return  # a verdict has cut it off since
        if author not in self.vector:
            self._adopt_claims(author)
        self.vector[author] = max(seq, self.vector.get(author, 0))
        source = self.requests.on_stored(author, seq)
        for link in self.links.values():
            link.changed_authors[author] = None
        if author.startswith(self.key) and is_urgent:
            self._fresh.append((author, seq))  # who carries it is decided with the time
            return
        # Who carries it may only be about to have it: what it cannot deliver is requested here.
        is_carried = not self.relays or any(link.carries for link in self.links.values())
        for link in self.links.values():
            needs_state = self.needs(link.key, author, seq)
            if author.startswith(link.key):
                # The author waits for a report of its update. This machine sends one if it carries
                # for the author, or if it received the update from another peer.
                carries = self.carriers.is_far_above(self._stated_uplink, link.uplink or math.inf)
                needs_state |= carries or source not in ("", link.key)
            elif link.has_state and link.is_eager_for(author) and is_carried:
                # Without the carrier one peer may request it here, and not all be pushed it.
                link.lazy_keys[author.partition(".")[0]] = None
            elif link.has_state and link.is_eager_for(author) and is_urgent and needs_state:
                self._pushes.append(PushUpdate(link.key, author, seq))
                needs_state = False
            link.has_news = link.has_news or needs_state or link.complete or self.complete

    def on_pruned(self, author: str, seq: int) -> None:
        """Record that the payloads of this author's updates up to `seq` have been removed here."""
        self.pruned[author] = seq
        for link in self.links.values():
            link.changed_authors[author] = None

    def on_verdicts(
        self,
        vector: dict[str, int],
        verdicts: VerdictSet,
        now: float,
    ) -> None:
        """Record that our ledger has other verdicts, and this version vector."""
        self.vector = dict(vector)
        self._clamp = verdicts.clamp
        for link in self.links.values():
            link.vector = verdicts.clamp(link.vector)
            # A State of changes cannot express that an author's sequence number went down.
            link.next_full_state_at = now
            link.has_news = True
        self.requests.cancel_retracted(verdicts.is_retracted)

    def ban_author(self, author: str, seq: int) -> None:
        """Request no updates of this author from a sequence number on."""
        self.requests.banned[author] = min(seq, self.requests.banned.get(author, seq))

    def permit_author(self, author: str) -> None:
        """Request all updates of this author again."""
        self.requests.banned.pop(author, None)

    def holders(self, author: str, seq: int) -> list[str]:
        """Return the keys of the links that claim to have this update."""
        return [key for key, link in self.links.items() if link.vector.get(author, 0) >= seq]

    # ---- events: peers

    def on_connected(self, key: str, now: float, meeting: Meeting | None = None) -> None:
        """Record that a link to this peer is established; it replaces an earlier one."""
        self.requests.on_disconnected(key)
        self.ended.pop(key, None)
        meeting = meeting or Meeting()
        eager = sum(link.eager for link in self.links.values()) < MIN_EAGER_LINKS
        self.links[key] = LinkState(
            key,
            now,
            now,
            next_full_state_at=now,
            volunteer=meeting.volunteer or key,
            meeting=meeting,
            eager=eager,
        )
        self.membership.on_connected(key, now, meeting)

    def on_left(self, key: str) -> None:
        """Record that this peer's program has ended: it publishes no further update."""
        if link := self.links.get(key):
            link.complete = True

    def on_disconnected(self, key: str, now: float) -> None:
        """Record that the link to this peer is gone."""
        link = self.links.pop(key, None)
        if link is not None and link.complete:
            store_newest(self.ended, key, None, MANY)
        self.requests.on_disconnected(key)
        self.authors.on_disconnected(key)
        said_goodbye = link is not None and link.leaving_since is not None
        self.membership.on_disconnected(key, now, said_goodbye)

    def on_message(self, key: str, now: float) -> None:
        """Record that a message of any kind has arrived from this peer."""
        if link := self.links.get(key):
            link.last_received_at = now

    def on_state(self, key: str, state: PeerState, now: float) -> bool:
        """Record a State that has arrived from this peer.

        Returns:
            Whether it calls for actions now: most States report only what is known already.
        """
        link = self.links.get(key)
        if link is None:
            return False
        is_news = not link.has_state or state.complete or link.complete
        link.last_received_at = now
        link.has_state = True
        link.rate = state.rate
        link.complete = state.complete
        link.uplink = state.uplink
        link.anchor_vector = state.anchor_vector
        link.anchor_digest = state.anchor_digest
        self._compare_anchors(link)
        if state.full:
            self.authors.on_full_state(key, state.vector)
            link.vector = {}
            link.pruned = {}
        most = FEW if self.wants_updates else MAX_CLAIMS_WHILE_JOINING
        for author, seq in state.vector.items():
            if self.is_known(author):
                link.vector[author] = max(seq, link.vector.get(author, 0))
            else:
                claim = AuthorClaim(seq, state.pruned.get(author, 0))
                self.authors.record_claim(key, author, claim, most)
        link.pruned |= {author: n for author, n in state.pruned.items() if self.is_known(author)}
        if state.declined:
            # No honest peer declines more at once, and each one would cost a walk over all authors.
            link.declined = dict(islice(state.declined.items(), MAX_DECLINED))
            link.make_lazy_for(filter(self.is_known, link.declined), self.vector)
        link.has_news = link.has_news or (state.complete and bool(link.changed_authors))
        known = {author: seq for author, seq in state.vector.items() if author in link.vector}
        self.requests.on_vector(key, known, self.vector)
        is_unknown = len(known) < len(state.vector)
        return is_news or is_unknown or self.requests.are_any_missing

    def on_author(self, key: str, author: str) -> bool:
        """Record that a valid header of this author, with its ticket, has arrived from a peer.

        Returns:
            Whether the peer was probed for it: then no payloads follow, unless it was on its way.
        """
        is_answer = self.authors.is_probed(key, author)
        self.authors.add(author)
        self._adopt_claims(author)
        return is_answer

    def _adopt_claims(self, author: str) -> None:
        """Take what links claim of an author as theirs: the author is known from now on."""
        for key, claim in self.authors.pop_claims(author):
            link = self.links[key]
            link.vector[author] = max(claim.seq, link.vector.get(author, 0))
            if claim.pruned:
                link.pruned[author] = max(claim.pruned, link.pruned.get(author, 0))
            self.requests.on_vector(key, {author: claim.seq}, self.vector)

    def on_bare_header(self, key: str, author: str, seq: int, now: float) -> None:
        """Record that a valid header has arrived from this peer, which no payloads follow."""
        if self.requests.is_expected(key, author, seq):
            self.requests.on_failed(key, author, seq, now)

    def on_update(self, key: str, author: str, seq: int, now: float) -> None:
        """Record that the valid header of an update has arrived from this peer, after `on_author`.

        Its payloads follow, unless they are here already or another peer is sending them: then they
        are declined.
        """
        link = self.links.get(key)
        if link is None:
            return
        link.vector[author] = max(seq, link.vector.get(author, 0))
        is_stored = seq <= self.vector.get(author, 0)
        if is_stored or not self.requests.on_header(key, author, seq, now):
            self.decline(key, author, seq)
        else:
            # New updates arrive over this link, so it is part of the tree: both sides push over it.
            link.make_eager_for(author)
            link.relayed += not author.startswith(key)
            self.requests.on_vector(key, {author: seq}, self.vector)

    def on_request(self, key: str, author: str) -> None:
        """Record that this peer requested updates of an author: new ones are pushed to it again."""
        if link := self.links.get(key):
            link.make_eager_for(author)
            link.declined.pop(author, None)

    def on_goodbye(self, key: str, now: float) -> None:
        """Record that one side of this link said goodbye."""
        if link := self.links.get(key):
            link.leaving_since = link.leaving_since or now

    def decline(self, key: str, author: str, seq: int) -> None:
        """Decline this peer's push in the next State; then it only announces new updates."""
        link = self.links.get(key)
        if link is not None and len(link.to_decline) < MAX_DECLINED:
            link.make_lazy_for([author], self.vector)
            link.to_decline[author] = max(seq, link.to_decline.get(author, 0))

    # ---- queries

    def needs(self, key: str, author: str, seq: int) -> bool:
        """Return whether a linked peer seems to lack an update and has not declined it."""
        link = self.links.get(key)
        if link is None:
            return False
        return max(link.vector.get(author, 0), link.declined.get(author, 0)) < seq

    def is_known(self, author: str) -> bool:
        """Return whether an author exists for this machine: a valid header of it was seen."""
        return author in self.vector or self.authors.is_seen(author)

    def volunteer_vectors(self) -> dict[str, dict[str, int]]:
        """Return volunteer → what that volunteer's linked machines have, as they report it.

        A machine that has no updates counts only once it reports an anchor: without one, it is
        joining as well. Unknown authors count while this machine is joining and knows nobody. Safe
        to call from another thread.
        """
        vectors: dict[str, dict[str, int]] = {}
        for link in list(self.links.values()):
            claims = dict(self.authors.claims_of(link.key))
            if not link.has_state or not (link.vector or claims or link.anchor_vector):
                continue
            vector = vectors.setdefault(link.volunteer, {})
            entries = [*link.vector.copy().items()]
            if not self.wants_updates:
                entries += [(author, claim.seq) for author, claim in claims.items()]
            for author, seq in entries:
                vector[author] = max(seq, vector.get(author, 0))
        return vectors

    def agreed_vector(self, votes: Votes | None = None) -> dict[str, int]:
        """Return the version vector that most votes reach; None: those of all linked volunteers."""
        vectors = self.volunteer_vectors()
        if self.volunteer in vectors:
            return vectors[self.volunteer]
        return majority_vector(vectors, votes or count_each_alike(vectors))

    def can_replay(self, vector: dict[str, int], most: int) -> bool:
        """Return whether links offer every update up to a version vector, at most `most` in all."""
        if sum(vector.values()) > most:
            return False
        links = list(self.links.values())
        return all(self._is_offered(links, author, seq) for author, seq in vector.items())

    def _is_offered(self, links: list[LinkState], author: str, seq: int) -> bool:
        for link in links:
            claim = self.authors.claims_of(link.key).get(author, AuthorClaim(0))
            has_all = max(link.vector.get(author, 0), claim.seq) >= seq
            if has_all and max(link.pruned.get(author, 0), claim.pruned) == 0:
                return True
        return False

    @property
    def updates_behind(self) -> int:
        """Count the updates that most linked volunteers have and this machine lacks."""
        vectors = {name: vector for name, vector in self.volunteer_vectors().items() if vector}
        return sum(
            max(0, seq - self.vector.get(author, 0))
            for author, seq in majority_vector(vectors, count_each_alike(vectors)).items()
        )

    @property
    def has_carrier(self) -> bool:
        """Return whether a linked peer passes this machine's updates on to the others."""
        return math.isfinite(self.carrier_rate)

    @property
    def is_converged(self) -> bool:
        """Return whether every linked peer is complete and has exactly what this machine has.

        It is True when there is no link.
        """
        links = list(self.links.values())
        return all(
            link.has_state and link.complete and link.vector == self.vector for link in links
        )

    def is_overtaken(self, now: float, votes: Votes) -> bool:
        """Return whether only a snapshot helps.

        That is so if for a while no linked peer has had the next missing update of an author, of
        whom most votes have more than this machine.
        """
        agreed = self.agreed_vector(votes)
        unavailable = self.unavailable_authors(now)
        return any(agreed.get(author, 0) > self.vector.get(author, 0) for author in unavailable)

    def unavailable_authors(self, now: float) -> list[str]:
        """Return the authors whose next missing update no linked peer has had for a while."""
        return self.requests.unavailable_authors(now) if self.wants_updates else []

    def sample_heads(self, count: int) -> list[tuple[str, int]]:
        """Return (author, last seq) of up to `count` random authors in our ledger."""
        return self._random.sample(sorted(self.vector.items()), min(count, len(self.vector)))

    # ---- decisions

    def next_actions(self, now: float) -> list[Action]:
        """Return the actions that are due, and schedule the next ones."""
        self._spread_own_updates(now)
        actions: list[Action] = [*self._pushes]
        self._pushes = []
        links = list(self.links.values())
        # One State alone wakes the thread as often as one to each peer.
        min_interval = self._min_state_interval
        is_any_due = any(link.is_state_due(now, min_interval) for link in links)
        slack = STATE_INTERVALS.slack_seconds if is_any_due else 0.0
        for link in links:
            actions += self._link_actions(link, now, slack)
        for key in self.membership.choose_goodbyes(self.links, now):
            self.links[key].leaving_since = now
            actions.append(SendGoodbye(key))
        actions += [Dial(peer) for peer in self.membership.choose_dials(self.links, now)]
        actions += self.membership.rendezvous.choose_requests(self.links, now)
        actions += self._update_requests(now)
        if self.wants_updates:
            actions += [ProbeAuthor(*probe) for probe in self.authors.choose_probes(now)]
        return actions

    def _spread_own_updates(self, now: float) -> None:
        """Push this machine's updates to the peer that carries them, or along the tree."""
        uplink = self._own_uplink
        carriers = self.carriers
        released = carriers.release_all() if self.complete else []
        told, failed = carriers.review(self.links, now)
        for spread in told:
            self._announce(spread.author, {spread.carrier})
        for spread in (*released, *failed):
            self._start_spread(spread.author, spread.seq, now, failed=spread.carrier)
        for author, seq in self._fresh:
            self._start_spread(author, seq, now)
        self._fresh = []
        best = None
        if math.isfinite(uplink):
            for link in self.links.values():
                link.is_fast = carriers.is_far_above(link.uplink, uplink)
                link.carries = carriers.carries(link, uplink, now)
            self.membership.set_carrying(self._is_fast_for_others, now)
            best = carriers.choose(self.links, uplink, now)
        self.carrier_rate = carriers.rate(best, now) if best else math.inf

    def _start_spread(self, author: str, seq: int, now: float, failed: str = "") -> None:
        """Push one of this machine's updates, whole to one peer after the other.

        `failed` is the key of the peer that should have carried it; empty if there was none.
        """
        lacking = [
            link
            for link in self.links.values()
            if link.has_state and self.needs(link.key, author, seq)
        ]
        lacking.sort(key=lambda link: (link.key == failed, -(link.uplink or 0.0)))
        carrier = None
        if not self.complete and math.isfinite(self._own_uplink):
            carrier = self.carriers.choose(self.links, self._own_uplink, now)
        if carrier is not None and carrier.key == failed:
            carrier = None
        keys = {link.key for link in lacking}
        if self.carriers.start((author, seq), keys, carrier, now, bool(failed)) and carrier:
            self._pushes.append(PushUpdate(carrier.key, author, seq))
            for link in lacking:
                link.lazy_keys[self.key] = None
            return
        eager = [link.key for link in lacking if link.is_eager_for(author)]
        if not eager:  # a carrier was there: the tree grows again from here
            eager = [link.key for link in lacking[:MIN_EAGER_LINKS]]
        self._pushes += [PushUpdate(key, author, seq) for key in eager]
        self._announce(author, set(eager))

    def _announce(self, author: str, informed: set[str]) -> None:
        """Send a State soon to the peers that need to know of a new update of this machine."""
        for link in self.links.values():
            link.changed_authors[author] = None
            is_needed = self.needs(link.key, author, self.vector.get(author, 0))
            needs_state = is_needed and link.key not in informed
            link.has_news = link.has_news or needs_state or link.complete or self.complete

    @property
    def _is_fast_for_others(self) -> bool:
        """Return whether most linked peers state an uplink far below this machine's."""
        stated = [link.uplink for link in self.links.values() if link.uplink]
        own = self._own_uplink
        slower = sum(self.carriers.is_far_above(own, uplink) for uplink in stated)
        return self.relays and 2 * slower > max(1, len(stated))

    def _link_actions(self, link: LinkState, now: float, slack: float) -> list[Action]:
        """Return the actions that are due on one link."""
        actions: list[Action] = []
        silence, goodbye = TIMEOUTS.peer_silence_seconds, TIMEOUTS.goodbye_seconds
        if now >= link.last_received_at + silence:
            actions.append(CloseLink(link.key, f"it sent nothing for {silence:.0f} seconds"))
            link.last_received_at = now  # so that it is disconnected once
        elif link.leaving_since is not None and now >= link.leaving_since + goodbye:
            actions.append(CloseLink(link.key, "it did not leave after a goodbye"))
            link.leaving_since = now
        if link.is_state_due(now, self._min_state_interval, slack):
            actions.append(SendState(link.key))
            link.last_state_at = now
            link.has_news = False
            link.next_state_at = now + self.state_interval * (0.75 + self._random.random() / 2)
        if now >= link.next_peers_at:
            link.next_peers_at = now + STATE_INTERVALS.peers_seconds
            if peers := self.membership.peers_to_share(link.key, self.links):
                actions.append(SendPeers(link.key, peers))
        return actions

    def _update_requests(self, now: float) -> list[RequestUpdates]:
        """Return the requests for missing updates; consecutive ones to one peer become one."""
        for key, author, seq in self.requests.expire(self.links, self.vector, now):
            self.decline(key, author, seq)
        merged: list[RequestUpdates] = []
        if not self.wants_updates:
            return merged
        for to, author, seq in self.requests.choose_requests(self.links, self.vector, now):
            self.links[to].make_eager_for(author)
            last = merged[-1] if merged else None
            if last and (last.to, last.author, last.last) == (to, author, seq - 1):
                merged[-1] = RequestUpdates(to, author, last.first, seq)
            else:
                merged.append(RequestUpdates(to, author, seq, seq))
        return merged

    def next_wakeup(self, now: float) -> float:
        """Return when to call `next_actions` again if no event occurs before, in seconds."""
        times = [
            now + STATE_INTERVALS.usual_seconds,
            self.requests.wake_at,
            self.membership.next_wakeup(self.links, now),
            self.carriers.next_wakeup,
        ]
        for link in self.links.values():
            times += [
                link.last_received_at + TIMEOUTS.peer_silence_seconds,
                link.next_state_at,
                link.next_peers_at,
            ]
            if link.has_news:
                times.append(link.last_state_at + self._min_state_interval)
        times += [incoming.deadline for incoming in self.requests.incoming.values()]
        if (probe_fails_at := self.authors.next_wakeup()) is not None:
            times.append(probe_fails_at)
        return max(now, min(times))

    @property
    def state_interval(self) -> float:
        """Return the seconds between two States to a peer when nothing changes, on average.

        Where the uplink is limited to a few kilobytes per second, States would fill it: there they
        are sent less often.
        """
        seconds = len(self.links) * STATE_BYTES / (STATE_SHARE * max(self._allowed_uplink, 1.0))
        return min(STATE_INTERVALS.longest_seconds, max(STATE_INTERVALS.usual_seconds, seconds))

    @property
    def _min_state_interval(self) -> float:
        """Return the seconds between two States to a peer when something changes for it."""
        slowdown = self.state_interval / STATE_INTERVALS.usual_seconds
        return STATE_INTERVALS.shortest_seconds * slowdown

    def build_state(self, key: str, now: float) -> PeerState | None:
        """Build our next State to this peer, and record its contents as sent.

        Returns:
            A full State if one is due and fits into a message; else the changes, or as many of them
            as a message holds. None if the peer is not connected.
        """
        link = self.links.get(key)
        if link is None:
            return None
        full_is_due = now >= link.next_full_state_at
        authors = self.vector if full_is_due else link.changed_authors
        if len(authors) <= MAX_STATE_AUTHORS:
            sent = [*authors]
        else:
            sent = self._random.sample(sorted(authors), MAX_STATE_AUTHORS)
        withheld = self.carriers.withheld(key)
        vector = {author: self.vector[author] for author in sent if author in self.vector}
        for author, seq in withheld.items():
            if author in vector and seq > 1:
                vector[author] = min(vector[author], seq - 1)
            else:
                vector.pop(author, None)
        anchor_vector, anchor_digest = next(reversed(self.anchor_digests.items()), (None, None))
        state = PeerState.model_construct(
            vector=vector,
            pruned={author: self.pruned[author] for author in sent if author in self.pruned},
            full=full_is_due and len(sent) == len(authors),
            declined=link.to_decline,
            anchor_vector=anchor_vector,
            anchor_digest=anchor_digest,
            rate=self.rate,
            complete=self.complete,
            uplink=self._stated_uplink,
        )
        if full_is_due:
            jitter = 0.75 + self._random.random() / 2
            link.next_full_state_at = now + STATE_INTERVALS.full_seconds * jitter
        for author in sent:
            link.changed_authors.pop(author, None)
        link.to_decline = {}
        link.has_news = bool(link.changed_authors)
        return state

    @property
    def _stated_uplink(self) -> float | None:
        """Bytes per second that States state of our uplink; None if that is not known."""
        if not self.relays:
            return 0.0
        uplink = min(self._own_uplink, MAX_UPLINK)
        return uplink if math.isfinite(self._own_uplink) else None

    def _compare_anchors(self, link: LinkState) -> None:
        """Compare a peer's anchor with ours, if ours has been at the same vector."""
        if link.anchor_vector is None:
            return
        ours = self.anchor_digests.get(link.anchor_vector)
        if ours is not None:
            link.anchor_agrees = ours == link.anchor_digest
