"""Send updates and blobs that peers request or gossip pushes, one piece at a time."""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from barnraise.exchange.gossip.gossip import Gossip
from barnraise.exchange.gossip.requests import UPDATE_WINDOW
from barnraise.exchange.snapshots.snapshot_server import SnapshotServer
from barnraise.ledger.blob_store import BlobStore
from barnraise.ledger.ledger import Ledger
from barnraise.peering.limits.rate_limit import FairShare, Meter
from barnraise.peering.limits.repeated_warnings import RepeatedWarnings
from barnraise.peering.limits.served_pieces import ServedPieces
from barnraise.peering.links.connection import OutgoingMessages
from barnraise.peering.links.received import MessageHandlers, Received
from barnraise.planning.uplink_budget import MIN_UPDATE_SHARE, UPDATE_SHARE, UplinkUse
from barnraise.protocol.messages import (
    BlobMissing,
    BlobPart,
    BlobRequest,
    UpdatePush,
    UpdateRequest,
)
from barnraise.protocol.types import Message

log = logging.getLogger("barnraise.exchange")

TRAFFIC_MEMORY = 0.5  # of what was counted, at each update that this machine publishes
OVERHEAD_SECONDS = 60.0  # over which all else is measured: longer than the burst at a start


class UpdateTraffic:
    """What an uplink has sent, counted from one update of this machine to the next. Pure.

    Updates are sent after they are published: an update counts once the next one follows it. What
    was counted without a carrier does not count with one. All else that the line carries is
    measured as what was put on it beyond updates: messages, acknowledgements, what was lost and
    sent again.
    """

    def __init__(self) -> None:
        self._payload_bytes = 0  # of all updates since the start
        self._overhead = Meter(OVERHEAD_SECONDS)
        self._published_at = -math.inf  # when the last update was, in seconds
        self._own_bytes = self._relayed_bytes = 0  # sent since then
        self._last_size = 0  # bytes of the last update
        self._has_carrier = False
        self._published = self._own = self._relayed = self._seconds = 0.0  # fading sums

    def on_published(self, size: int, now: float, has_carrier: bool = False) -> None:
        """Record that this machine published an update of so many bytes."""
        if has_carrier != self._has_carrier:
            self._published = self._own = self._relayed = self._seconds = 0.0
        elif math.isfinite(self._published_at):
            self._published = TRAFFIC_MEMORY * self._published + self._last_size
            self._own = TRAFFIC_MEMORY * self._own + self._own_bytes
            self._relayed = TRAFFIC_MEMORY * self._relayed + self._relayed_bytes
            self._seconds = TRAFFIC_MEMORY * self._seconds + now - self._published_at
        self._own_bytes = self._relayed_bytes = 0
        self._published_at = now
        self._last_size = size
        self._has_carrier = has_carrier

    def on_sent(self, size: int, is_own: bool) -> None:
        """Record that payload bytes were sent, of this machine's own updates or for others."""
        self._payload_bytes += size
        if is_own:
            self._own_bytes += size
        else:
            self._relayed_bytes += size

    def on_line(self, size: int, now: float) -> None:
        """Record how many bytes of all kinds this machine has put on its line since the start."""
        self._overhead.update(size - self._payload_bytes, now)

    def measured(self, has_carrier: bool = False) -> tuple[float, float] | None:
        """Return the copies of each own update, and bytes per second for others; None: unknown."""
        if not self._published or has_carrier != self._has_carrier:
            return None
        return self._own / self._published, self._relayed / max(self._seconds, 1e-9)

    def use(self, rate: float, links: int, carrier: float = math.inf) -> UplinkUse:
        """Return what an uplink of so many bytes per second carries.

        Updates have the part of UPDATE_SHARE that the overhead leaves. The greetings of the first
        seconds count as a part of the whole window. Before copies are measured, each linked peer
        may need one, and others' updates the rest.
        """
        overhead = max(0.0, self._overhead.window_rate)
        rate = max(MIN_UPDATE_SHARE * rate, rate - overhead / UPDATE_SHARE)
        has_carrier = math.isfinite(carrier)
        prior = (1.0, 0.0) if has_carrier else (max(1.0, links), math.inf)
        copies, relayed = self.measured(has_carrier) or prior
        return UplinkUse(rate, copies, relayed, 1 + links, carrier)

    def free_at(self, use: UplinkUse) -> float:
        """Return when the line has had time for what it sent since this machine published last.

        Each copy that the line sends makes it later. Bytes of others' updates count until own and
        others' bytes together are R − 1 copies of the last update; see `UplinkUse`.
        """
        most = max(self._own_bytes, (use.machines - 1) * self._last_size)
        sent = min(self._own_bytes + self._relayed_bytes, most)
        return self._published_at + sent / max(UPDATE_SHARE * use.rate, 1e-9)


class UpdateSender:
    """Answer requests for updates and blobs, and read what a connection sends from the disk.

    Attributes:
        traffic: What was sent of this machine's updates, and of others'.
    """

    def __init__(
        self,
        ledger: Ledger,
        gossip: Gossip,
        snapshots: SnapshotServer,
        uplink: FairShare,
        wake: Callable[[], None],
    ) -> None:
        """Send what the ledger and recent snapshots have to those who need it by gossip."""
        self._ledger = ledger
        self._gossip = gossip
        self._snapshots = snapshots
        self._uplink = uplink
        self._wake = wake
        self.traffic = UpdateTraffic()
        self._served = ServedPieces()
        self._repeats = RepeatedWarnings()

    def message_handlers(self) -> MessageHandlers:
        """Return what receives each type of message."""
        return {UpdateRequest: self.on_update_request, BlobRequest: self.on_blob_request}

    async def on_update_request(self, received: Received[UpdateRequest]) -> None:
        """Queue the requested updates, as far as they are here."""
        connection, request = received.connection, received.message
        if not request.headers:
            self._gossip.on_request(connection.key, request.author)
        carriers = self._gossip.carriers
        seqs = requested_seqs(self._ledger, request)
        await connection.wait_for_requests(len(seqs))
        for seq in seqs:
            if not request.headers and carriers.is_carried(connection.key, request.author, seq):
                continue
            connection.send_update(request.author, seq, not request.headers, is_requested=True)

    def on_blob_request(self, received: Received[BlobRequest]) -> None:
        """Queue the requested blob, or answer that it is not here."""
        connection, request = received.connection, received.message
        if any(blobs.has(request.digest) for blobs in self._blob_stores()):
            connection.send_blob(request.digest, request.offset)
        else:
            connection.send_message(BlobMissing(digest=request.digest))

    def open_update(
        self, key: str, author: str, seq: int, whole: bool, is_requested: bool
    ) -> OutgoingMessages:
        """Yield an update's signed header with the ticket that it names, then its payloads.

        The messages end early once the peer has the update. An update that a verdict names is its
        header alone. Nothing is yielded when the payloads, or the ticket, are not here.

        Args:
            key: The peer that it is for.
            author: The update's author.
            seq: Its sequence number.
            whole: Whether the payloads are sent too.
            is_requested: Whether the peer requested it.
        """
        messages = self._read_update(key, author, seq, whole)
        return self._limit_repeats(key, messages) if is_requested else messages

    def _read_update(self, key: str, author: str, seq: int, whole: bool) -> OutgoingMessages:
        ledger = self._ledger
        stored = ledger.header_with_ticket(author, seq)
        if stored is None or (whole and not self._gossip.needs(key, author, seq)):
            return
        signed, update, ticket = stored
        with_payloads = whole and not ledger.verdicts.is_retracted(author, seq)
        if with_payloads and not all(ledger.blobs.has(part.digest) for part in update.fragments):
            return
        yield UpdatePush(header=signed, ticket=ticket, has_payloads=with_payloads), b""
        if not with_payloads:
            return
        is_own = update.peer == self._gossip.key
        for part in update.payload_parts:
            for message, payload in self._read_blob([ledger.blobs], part.digest, 0):
                if not self._gossip.needs(key, author, seq):
                    return
                yield message, payload
                self.traffic.on_sent(len(payload), is_own)
        now = asyncio.get_running_loop().time()
        if self._gossip.carriers.on_sent(key, author, seq, now):
            self._wake()

    def open_blob(self, key: str, digest: str, offset: int) -> OutgoingMessages:
        """Yield a blob from `offset` on for a peer, from the first store that has it."""
        pieces = self._read_blob(self._blob_stores(), digest, offset)
        for piece in self._limit_repeats(key, pieces):
            self._snapshots.record_use(digest, asyncio.get_running_loop().time())
            yield piece
            # The rest of an update that another peer began to send, or a snapshot's.
            self.traffic.on_sent(len(piece[1]), is_own=False)

    def _limit_repeats(self, key: str, messages: OutgoingMessages) -> OutgoingMessages:
        """Yield what a peer requested, as far as its volunteer may be sent it."""
        for message, payload in messages:
            if self._may_send(key, message, payload):
                yield message, payload
                continue
            if isinstance(message, BlobPart):
                yield BlobMissing(digest=message.digest), b""
            return

    def _may_send(self, key: str, message: Message, payload: bytes) -> bool:
        """Return whether a peer's volunteer is sent this; this machine's own one is sent all."""
        link = self._gossip.links.get(key)
        if link is None or link.volunteer == self._gossip.volunteer:
            return link is not None
        if isinstance(message, BlobPart):
            # A request that begins one byte later is for the same piece.
            grid = self._uplink.piece_bytes
            piece = f"{message.digest} {grid} {message.offset // grid}"
        else:
            piece = message.model_dump_json()
        now = asyncio.get_running_loop().time()
        if self._served.try_send(link.volunteer, key, piece, len(payload or piece), now):
            return True
        text = "%s requests again and again what its volunteer was sent: it is sent no more for now"
        self._repeats.warn(f"again {link.volunteer}", text, key[:8])
        return False

    def _blob_stores(self) -> Sequence[BlobStore]:
        return self._ledger.blobs, self._snapshots.blobs

    def _read_blob(self, stores: Sequence[BlobStore], digest: str, offset: int) -> OutgoingMessages:
        """Yield the pieces of a blob, an empty one if nothing is left after `offset`.

        A peer that crashed before it verified the last bytes has all of them, and needs a piece.
        """
        for blobs in stores:
            total = blobs.size(digest)
            if total is None:
                continue
            while offset <= total:
                try:
                    data = blobs.read(digest, offset, self._uplink.piece_bytes)
                except FileNotFoundError:  # a snapshot's blob that was deleted meanwhile
                    return
                yield BlobPart(digest=digest, offset=offset, total=total), data
                offset += len(data)
                if offset == total or not data:
                    return
            return


def requested_seqs(ledger: Ledger, request: UpdateRequest) -> range:
    """Return the sequence numbers to send for a request, as far as they may be here.

    Headers alone are sent last one first: a peer recognises an earlier one by the later, which
    names its digest. A request for what does not exist costs its sender a few bytes, so it must not
    cost this machine a look into the database for each number.
    """
    if request.headers:
        last = min(request.last, ledger.last_seq(request.author))
        first = max(request.first, last - UPDATE_WINDOW + 1)
        return range(last, first - 1, -1)
    last = min(request.last, request.first + UPDATE_WINDOW - 1, ledger.head(request.author).seq)
    return range(request.first, last + 1)
