"""Schedule requests for missing updates. Pure.

The scheduler knows what is missing, what is on its way and which peer to ask for the rest.

Updates that are on their way are not requested. An announced update has a grace period to arrive
along the broadcast tree (see `gossip`), and an update whose transfer has started is waited for
until its source stalls. Then another peer is asked for what is still missing of it. The grace
period and the timeout correspond to the timers with which Plumtree repairs its tree (Leitão,
Pereira and Rodrigues, SRDS 2007).
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from barnraise.exchange.gossip.link_state import LinkState

MIN_GRACE_SECONDS = 1.0  # for an announced update to arrive along the tree
MAX_GRACE_SECONDS = 15.0  # of that where the tree has been slow
RESPONSE_SECONDS = 5.0  # for the answer to a request to start
STALL_SECONDS = 10.0  # without a new byte after which a transfer counts as failed
# Seconds after which a transfer that will take as long again continues from another peer.
SLOW_TRANSFER_SECONDS = 60.0
UPDATE_RETRY_SECONDS = 20.0  # before a peer that did not deliver an update is asked again
SNAPSHOT_DELAY_SECONDS = 10.0  # without any source of an update before only a snapshot helps
# Updates of one author, or from one peer, in transfer at once; as many enter the ledger together.
UPDATE_WINDOW = 64
MAX_EXAMINED = 4096  # missing updates that one look examines; the next look goes on


@dataclass
class IncomingUpdate:
    """An update on its way to this machine."""

    source: str  # key of the peer that sends it; empty if it is here and waits for earlier ones
    deadline: float  # when another peer may be asked for it, in seconds
    has_header: bool = False  # whether its header has arrived
    since: float = math.inf  # when its source sent the first of it, in seconds
    received: int = 0  # new bytes of its payloads since then
    is_slow: bool = False  # whether another peer should continue the transfer


@dataclass(frozen=True)
class ArrivedBytes:
    """What a piece adds to an update."""

    size: int = 0  # the bytes that were not here before
    remaining: int = 0  # the bytes of the update's payloads that are missing after it


class RequestScheduler:
    """The updates that are missing or on their way, and the requests for them."""

    def __init__(self, seed: int) -> None:
        self.incoming: dict[tuple[str, int], IncomingUpdate] = {}  # by author and seq
        # author → the first sequence number that is not requested
        self.banned: dict[str, int] = {}
        self.wake_at = math.inf  # when a request that waits for its time is due
        # author → keys of the links that may have more of it than this machine (an ordered set)
        self._ahead: dict[str, dict[str, None]] = {}
        self._announced_at: dict[str, dict[int, float]] = {}  # author → seq → first announcement
        # author → since when no linked peer has the payloads of its next missing update
        self._unavailable_since: dict[str, float] = {}
        # (peer, author, seq) of a failed request → until when it is not repeated
        self._failed_until: dict[tuple[str, str, int], float] = {}
        # The same of transfers that stalled or were slow → until when the peer cannot resume them
        # by itself. One that was asked and has not answered yet may have much else to send.
        self._stalled_until: dict[tuple[str, str, int], float] = {}
        self._replaced_at = math.inf  # when a slow transfer can continue from another peer
        self._lag = 0.0  # seconds between an update's announcement and its push, a running mean
        self._random = random.Random(seed)

    # ---- events

    def reset(self) -> None:
        """Forget which peers are ahead; `on_vector` reports them again."""
        self._ahead = {}
        self._unavailable_since = {}

    def on_vector(self, key: str, theirs: Mapping[str, int], ours: Mapping[str, int]) -> None:
        """Compare what a peer reports to have, of some authors, with what this machine has."""
        for author, seq in theirs.items():
            if seq > ours.get(author, 0):
                self._ahead.setdefault(author, {})[key] = None

    def on_stored(self, author: str, seq: int) -> str:
        """Record that this update is in the ledger; return who sent it, "" if that is not known."""
        incoming = self.incoming.pop((author, seq), None)
        self._announced_at.get(author, {}).pop(seq, None)
        return incoming.source if incoming else ""

    def on_header(self, key: str, author: str, seq: int, now: float) -> bool:
        """Record that a peer sent the header of a missing update.

        Returns:
            Whether the peer should send the payloads, too. It should not while another peer is
            sending them.
        """
        if (key, author, seq) in self._stalled_until:
            return False  # it would hold the update up again
        incoming = self.incoming.get((author, seq))
        is_elsewhere = incoming is not None and incoming.source != key
        announced_at = self._announced_at.get(author, {}).get(seq)
        if announced_at and (is_elsewhere or incoming is None):
            self._lag += 0.2 * (now - announced_at - self._lag)
        if incoming is not None and is_elsewhere and incoming.has_header:
            return False
        if is_elsewhere or incoming is None or not incoming.has_header:
            deadline = now + STALL_SECONDS
            self.incoming[author, seq] = IncomingUpdate(key, deadline, True, now)
        return True

    def on_payload_bytes(
        self, key: str, author: str, seq: int, now: float, arrived: ArrivedBytes
    ) -> None:
        """Record that a piece of this update has arrived from a peer.

        Pieces that are here already prolong no transfer, and those of a peer from which the update
        is not expected change nothing: they must not keep it from being requested elsewhere.
        """
        incoming = self.incoming.get((author, seq))
        if incoming is None:
            if not arrived.size or (key, author, seq) in self._stalled_until:
                return
            incoming = self.incoming[author, seq] = IncomingUpdate(key, now + STALL_SECONDS)
        if incoming.source != key or not arrived.size:
            return
        if not incoming.has_header:
            incoming.has_header = True
            incoming.since = now
        incoming.received += arrived.size
        incoming.deadline = now + STALL_SECONDS
        seconds = now - incoming.since
        is_old = seconds > SLOW_TRANSFER_SECONDS
        expected = incoming.received / seconds * SLOW_TRANSFER_SECONDS if is_old else 0.0
        incoming.is_slow = is_old and expected < arrived.remaining

    def on_buffered(self, author: str, seq: int) -> None:
        """Record that this update is complete here and waits for its author's earlier ones."""
        self.incoming[author, seq] = IncomingUpdate("", math.inf, has_header=True)

    def is_expected(self, key: str, author: str, seq: int) -> bool:
        """Return whether this peer is to deliver this update."""
        incoming = self.incoming.get((author, seq))
        return incoming is not None and incoming.source == key

    def on_failed(self, key: str, author: str, seq: int, now: float) -> None:
        """Record that this peer cannot deliver this update."""
        self.incoming.pop((author, seq), None)
        self._failed_until[key, author, seq] = now + UPDATE_RETRY_SECONDS

    def on_lost(self, author: str, seq: int) -> None:
        """Record that what has arrived of this update is useless; it is requested again."""
        self.incoming.pop((author, seq), None)

    def on_disconnected(self, key: str) -> None:
        """Forget the updates that were expected from this peer."""
        self.incoming = {
            identity: incoming
            for identity, incoming in self.incoming.items()
            if incoming.source != key
        }

    def cancel_retracted(self, is_retracted: Callable[[str, int], bool]) -> None:
        """Stop waiting for updates that a verdict retracted, and ask again for others."""
        self._failed_until.clear()
        self.incoming = {
            identity: incoming
            for identity, incoming in self.incoming.items()
            if not is_retracted(*identity)
        }

    # ---- decisions

    @property
    def are_any_missing(self) -> bool:
        """Whether some link may have updates that this machine lacks."""
        return bool(self._ahead)

    def unavailable_authors(self, now: float) -> list[str]:
        """Return the authors whose next missing update no linked peer has had for a while."""
        return [
            author
            for author, since in list(self._unavailable_since.items())
            if now >= since + SNAPSHOT_DELAY_SECONDS
        ]

    def expire(
        self, links: Mapping[str, LinkState], ours: Mapping[str, int], now: float
    ) -> list[tuple[str, str, int]]:
        """Give up on transfers that have stalled, and on failures that are long enough ago.

        A transfer that is slow ends, too, if another peer can continue it.

        Returns:
            (peer, author, seq) of each slow transfer that ended; the peer need not send the rest.
        """
        ended: list[tuple[str, str, int]] = []
        self._replaced_at = math.inf
        for (author, seq), incoming in list(self.incoming.items()):
            if now >= incoming.deadline:
                self._on_stalled(incoming, author, seq, now)
            elif seq <= ours.get(author, 0):
                del self.incoming[author, seq]
            elif incoming.is_slow:
                ready_at = self._other_source_at(links, incoming.source, author, seq)
                if ready_at <= now:
                    ended.append((incoming.source, author, seq))
                    self._on_stalled(incoming, author, seq, now)
                else:
                    self._replaced_at = min(self._replaced_at, ready_at)
        self._failed_until = _drop_past(self._failed_until, now)
        self._stalled_until = _drop_past(self._stalled_until, now)
        return ended

    def _on_stalled(self, incoming: IncomingUpdate, author: str, seq: int, now: float) -> None:
        """Expect an update from its source no longer."""
        self.on_failed(incoming.source, author, seq, now)
        if incoming.has_header:
            self._stalled_until[incoming.source, author, seq] = now + UPDATE_RETRY_SECONDS

    def _other_source_at(
        self, links: Mapping[str, LinkState], source: str, author: str, seq: int
    ) -> float:
        """Return when a peer other than `source` can be asked for an update; inf if none has it."""
        return min(
            (
                self._failed_until.get((key, author, seq), 0.0)
                for key, link in links.items()
                if key != source and link.pruned.get(author, 0) < seq <= link.vector.get(author, 0)
            ),
            default=math.inf,
        )

    def choose_requests(
        self, links: Mapping[str, LinkState], ours: Mapping[str, int], now: float
    ) -> list[tuple[str, str, int]]:
        """Choose the updates to request now and mark them as incoming.

        Returns:
            (peer, author, seq) for each request, each author's in ascending order.
        """
        self.wake_at = self._replaced_at
        if not self._ahead:
            return []
        load = self._count_incoming(links)
        grace = self._grace_seconds(links)
        requests: list[tuple[str, str, int]] = []
        examined = 0
        for author, keys in list(self._ahead.items()):
            if examined >= MAX_EXAMINED:
                self.wake_at = now
                break
            last_stored = ours.get(author, 0)
            sources = [
                link
                for key in keys
                if (link := links.get(key)) and link.vector.get(author, 0) > last_stored
            ]
            last_wanted = self.banned.get(author, math.inf) - 1
            if not sources or last_stored >= last_wanted:
                self._ahead.pop(author, None)
                self._announced_at.pop(author, None)
                self._unavailable_since.pop(author, None)
                continue
            self._check_available(author, last_stored, sources, now)
            able = [link for link in sources if link.pruned.get(author, 0) <= last_stored]
            if all(load[link.key] >= UPDATE_WINDOW for link in able):
                continue
            newest = max(link.vector[author] for link in sources)
            last = int(min(last_stored + UPDATE_WINDOW, newest, last_wanted))
            # The author goes to the end, so that a look which ends early continues after it.
            self._ahead[author] = self._ahead.pop(author)
            examined += last - last_stored
            ripe = self._ripe_updates(author, range(last_stored + 1, last + 1), grace, now)
            requests += self._assign(author, ripe, sources, load, now)
        return requests

    def _check_available(
        self, author: str, last_stored: int, sources: list[LinkState], now: float
    ) -> None:
        """Record whether some source can be expected to have an author's next missing update.

        A source that has failed to send it cannot, so that a peer which claims everything and sends
        nothing does not hide that all others have pruned it.
        """
        has_pruned = [link.pruned.get(author, 0) > last_stored for link in sources]
        missing = last_stored + 1
        is_available = any(
            not pruned and (link.key, author, missing) not in self._failed_until
            for link, pruned in zip(sources, has_pruned, strict=True)
        )
        if is_available or not any(has_pruned):
            self._unavailable_since.pop(author, None)
        else:
            self._unavailable_since.setdefault(author, now)

    def _count_incoming(self, links: Mapping[str, LinkState]) -> dict[str, int]:
        """Return how many updates are incoming from each linked peer, by key."""
        load = dict.fromkeys(links, 0)
        for incoming in self.incoming.values():
            if incoming.source in load:
                load[incoming.source] += 1
        return load

    def _grace_seconds(self, links: Mapping[str, LinkState]) -> float:
        """Return how many seconds an announced update has to arrive before it is requested."""
        if not any(link.eager for link in links.values()):
            return 0.0
        return min(MAX_GRACE_SECONDS, max(MIN_GRACE_SECONDS, 4 * self._lag))

    def _ripe_updates(self, author: str, seqs: range, grace: float, now: float) -> list[int]:
        """Return those updates of one author that are not incoming and past their grace period."""
        announced_at = self._announced_at.setdefault(author, {})
        ripe: list[int] = []
        for seq in seqs:
            if (author, seq) in self.incoming:
                continue
            ripe_at = announced_at.setdefault(seq, now) + grace
            if ripe_at > now:
                self.wake_at = min(self.wake_at, ripe_at)
            else:
                ripe.append(seq)
        return ripe

    def _assign(
        self,
        author: str,
        seqs: list[int],
        sources: list[LinkState],
        load: dict[str, int],
        now: float,
    ) -> list[tuple[str, str, int]]:
        """Assign updates of one author to as few sources as possible; count them in `load`."""
        requests: list[tuple[str, str, int]] = []
        favourite: LinkState | None = None
        for seq in seqs:
            holders = [
                link
                for link in sources
                if link.pruned.get(author, 0) < seq <= link.vector[author]
                and load[link.key] < UPDATE_WINDOW
            ]
            able = [link for link in holders if (link.key, author, seq) not in self._failed_until]
            if not able:
                retries = [self._failed_until[link.key, author, seq] for link in holders]
                self.wake_at = min([self.wake_at, *retries])
                continue
            able = self._prefer(able, author)
            if favourite is None or favourite not in able:
                favourite = min(able, key=lambda link: (load[link.key], self._random.random()))
            load[favourite.key] += 1
            # A peer that passes on the updates of many has much else to send.
            patience = STALL_SECONDS if favourite.is_fast else RESPONSE_SECONDS
            self.incoming[author, seq] = IncomingUpdate(favourite.key, now + patience)
            requests.append((favourite.key, author, seq))
        return requests

    def _prefer(self, able: list[LinkState], author: str) -> list[LinkState]:
        """Return the sources to ask for an author's updates first.

        They are those with fast uplinks that have not failed lately; one that passes nothing on is
        asked if no other has the update.
        """
        failing = {key for key, _, _ in self._failed_until}
        fast = [link for link in able if link.is_fast and link.key not in failing]
        willing = [link for link in able if link.uplink != 0 or author.startswith(link.key)]
        return fast or willing or able


def _drop_past(
    times: Mapping[tuple[str, str, int], float], now: float
) -> dict[tuple[str, str, int], float]:
    """Return the entries whose time has not come."""
    return {request: until for request, until in times.items() if until > now}
