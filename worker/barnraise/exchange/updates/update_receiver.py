"""Receive updates: a signed header, then its payloads in any order and from any peer.

An update enters the ledger and the queue to the training loop only when it is complete, checked and
durable. One that arrives before its author's earlier ones waits; how many may wait is bounded. All
methods run on the exchange's event loop; disk access and arithmetic run in the disk thread.
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from blake3 import blake3

from barnraise.errors import FloodError, MessageError
from barnraise.exchange.blobs.blob_fetcher import BlobFetcher
from barnraise.exchange.blobs.piece_sources import PieceSources
from barnraise.exchange.gossip.gossip import RequestUpdates
from barnraise.exchange.gossip.handler_context import HandlerContext
from barnraise.exchange.gossip.requests import UPDATE_WINDOW, ArrivedBytes
from barnraise.exchange.updates.author_pace import AuthorPace, PacedUpdate
from barnraise.exchange.updates.transfer_budget import ReservedTotal, TransferBudget
from barnraise.exchange.verdicts.verdict_handler import VerdictHandler
from barnraise.ledger.blob_store import AppendResult
from barnraise.ledger.ledger import Outcome
from barnraise.ledger.retention import payload_budget
from barnraise.ledger.update_queue import Samples, Units, UpdateQueue, anchor_entry, count_bytes
from barnraise.ledger.validation import (
    UpdateRules,
    decode_payload,
    open_ticket,
    validate_claim,
    validate_header,
)
from barnraise.peering.limits.rate_limit import TokenBuckets
from barnraise.peering.limits.repeated_warnings import RepeatedWarnings
from barnraise.peering.limits.service_limits import SERVICE_LIMITS, Service
from barnraise.peering.links.received import MessageHandlers, Received
from barnraise.protocol.fork_proof import Fork
from barnraise.protocol.messages import (
    BlobMissing,
    BlobPart,
    BlobRequest,
    Signed,
    Ticket,
    Update,
    UpdatePush,
    UpdateRequest,
)

log = logging.getLogger("barnraise.exchange")

MAX_INCOMPLETE = 512  # headers that wait for payloads or for their author's earlier updates
MAX_INCOMPLETE_OF_VOLUNTEER = 256  # such headers of one person's machines
INCOMPLETE_SHARE = 0.5  # of the disk budget that the payloads of such updates may take
EXPIRY_INTERVAL = 30.0  # seconds between two looks for updates whose bytes do not arrive
# Seconds by which an update may be ahead of our clock. One that is further ahead waits.
CLOCK_TOLERANCE = 10.0
DELETION_DELAY = 0.5  # seconds from the first dropped update until unneeded payloads are deleted
MAX_WAIT = 3600.0  # seconds until it is looked at again
MAX_FALSE_HEADERS = 256  # that are remembered, the first of each author
MAX_VALIDATED = 256  # headers whose signatures are not verified again, of some kilobytes each
MAX_DECODED_BYTES = 16 << 20  # decoded units that stay in memory until the training loop adds them
MAX_BUFFERED_BYTES = 8 << 20  # payloads that stay in memory until their update is complete
MAX_BUFFERED_UPDATE = 2 << 20  # bytes of the payloads of one such update


class PartOutcome(Enum):
    """What became of a piece of a payload."""

    UNWANTED = "unwanted"  # nothing here waits for it
    IGNORED = "ignored"  # another peer is to send this payload
    BUFFERED = "buffered"  # it waits in memory for the other payloads of its update
    STORED = "stored"


@dataclass(frozen=True)
class _Piece:
    """A piece of a payload, and the peer that sent it."""

    part: BlobPart
    payload: memoryview
    source: str


@dataclass
class IncompleteUpdate:
    """An update whose header is here and that is not in the ledger yet.

    Attributes:
        push: The signed header and the signed ticket that it names.
        update: The header.
        ticket: The ticket.
        source: The peer that sent the header.
        missing: Payload digest → bytes, of payloads that have not arrived.
        arrived: Payload digest → bytes of it that are here, of those that are missing.
        buffered: Payload digest → payloads of those that are missing on disk and here in memory.
        is_expected: Whether it is recorded on disk that these payloads are on their way.
        last_byte_at: Event loop time of its header or of its last byte.
        is_verified: Whether all payloads are here and match the header.
        is_ahead: Whether its key had published more than it can have trained when it was appended.
        units: What they decode to, where that is kept in memory.
        samples: The elements by which the update is judged.
    """

    push: UpdatePush
    update: Update
    ticket: Ticket
    source: str
    missing: dict[str, int]
    last_byte_at: float
    arrived: dict[str, int] = field(default_factory=dict)
    buffered: dict[str, _Piece] = field(default_factory=dict)
    is_expected: bool = False
    is_verified: bool = False
    is_ahead: bool = False
    units: Units = ()
    samples: Samples = ()

    @property
    def signed(self) -> Signed:
        """The signed header."""
        return self.push.header

    @property
    def is_buffered(self) -> bool:
        """Whether all payloads that are missing on disk are in memory."""
        return self.missing.keys() <= self.buffered.keys()

    def record_piece(self, part: BlobPart, size: int) -> ArrivedBytes:
        """Record a piece of `size` bytes, and return what it adds to the update."""
        present = self.arrived.get(part.digest, 0)
        end = part.offset + size
        added = end - present if part.offset <= present < end else 0
        if added:
            self.arrived[part.digest] = end
        remaining = sum(
            total - self.arrived.get(digest, 0) for digest, total in self.missing.items()
        )
        return ArrivedBytes(added, remaining)


@dataclass(frozen=True)
class _DiskResult:
    """What one visit to the disk thread did with an update.

    Attributes:
        is_checked: Whether all payloads are here and were compared with the header.
        units: What they decode to, where that is kept in memory.
        samples: The elements by which the update is judged.
        error: How they differ from the header, if they do.
        damaged: Digests of payloads that are no longer what they were when they arrived.
        outcome: Of appending the update to the ledger; None if that was not due.
    """

    is_checked: bool = False
    units: Units = ()
    samples: Samples = ()
    error: MessageError | None = None
    damaged: tuple[str, ...] = ()
    outcome: Outcome | None = None


@dataclass(frozen=True)
class FalseHeader:
    """A header whose payloads are here and differ from it: no peer's ledger can contain it."""

    push: UpdatePush
    update: Update


@dataclass(frozen=True)
class ReceiverParts:
    """What the receiver passes updates on to.

    Attributes:
        queue: Where changes wait for the training loop.
        verdicts: Receives proofs of forks, and headers that may lead to them.
        fetcher: Receives the pieces of blobs that are no update's payload.
        pace: How fast each author's updates enter the ledger.
        clock: Returns seconds since 1970, by the coordinators' clock.
        on_own_update: Called with an update of this machine's key that a peer sends.
        sample: Returns the elements of a fragment's units by which an update is judged, in any
            thread.
    """

    queue: UpdateQueue
    verdicts: VerdictHandler
    fetcher: BlobFetcher
    pace: AuthorPace
    clock: Callable[[], float]
    on_own_update: Callable[[Update], None]
    sample: Callable[[int, torch.Tensor], torch.Tensor]


class UpdateReceiver:
    """Collect incoming updates until they can enter the ledger."""

    def __init__(
        self,
        context: HandlerContext,
        rules: UpdateRules,
        parts: ReceiverParts,
    ) -> None:
        """Start without incomplete updates.

        Args:
            context: What the server's handlers share.
            rules: What headers are checked against.
            parts: See `ReceiverParts`.
        """
        self._clock = parts.clock
        self._pace = parts.pace
        self._fetcher = parts.fetcher
        self._on_own_update = parts.on_own_update
        self._sample = parts.sample
        self._wake = context.wake
        self._spawn = context.spawn
        self._rules = rules
        self._ledger = context.ledger
        self._gossip = context.gossip
        self._run_on_disk = context.run_on_disk
        self._disconnect = context.disconnect
        self._queue = parts.queue
        self._verdicts = parts.verdicts
        self._incomplete: dict[tuple[str, int], IncompleteUpdate] = {}
        disk_budget = payload_budget(shutil.disk_usage(context.ledger.blobs.folder).free)
        self._transfers: TransferBudget[tuple[str, int]] = TransferBudget(
            ReservedTotal(int(INCOMPLETE_SHARE * disk_budget), MAX_INCOMPLETE),
            MAX_INCOMPLETE_OF_VOLUNTEER,
        )
        self._waiting_for: dict[str, set[tuple[str, int]]] = {}  # payload → (author, seq) of those
        self._repeats = RepeatedWarnings(log)
        # Key, text and signature of headers and their tickets → their updates, oldest first.
        self._validated: dict[tuple[str, ...], Update] = {}
        self._unneeded = TokenBuckets(SERVICE_LIMITS[Service.UNNEEDED_HEADERS]["peer"])
        self._pieces = PieceSources()
        self._false_headers: dict[str, FalseHeader] = {}  # by author, oldest first
        self._buffered_bytes = 0
        self._will_delete = False  # whether a look for unneeded payloads is on its way
        self._waiting_for_time: set[str] = set()  # authors whose next update is of a later time

    @property
    def rules(self) -> UpdateRules:
        """What headers are checked against."""
        return self._rules

    def set_rules(self, rules: UpdateRules) -> None:
        """Replace the rules, which change with the mirror list."""
        self._rules = rules
        self._validated.clear()

    @property
    def incomplete(self) -> list[tuple[str, int]]:
        """The (author, sequence number) of every update that is not in the ledger yet."""
        return list(self._incomplete)

    async def start(self) -> None:
        """Let complete updates enter the ledger from now on; those that wait enter at once."""
        self._queue.open()
        for author in {author for author, _ in self._incomplete}:
            await self._append_ready(author)

    # ---- what is incomplete

    def updates_in_flight(self) -> list[Update]:
        """Return the updates whose headers are here and that are not in the ledger yet.

        Safe to call from another thread.
        """
        return [incomplete.update for incomplete in list(self._incomplete.values())]

    def is_waiting_for_payloads(self, update: Update) -> bool:
        """Return whether an update's header is here and its payloads are still to arrive."""
        return (update.author, update.seq) in self._incomplete

    def updates_waiting_for(self, digest: str) -> list[tuple[str, int]]:
        """Return the (author, sequence number) of updates that lack this payload."""
        return list(self._waiting_for.get(digest, ()))

    def build_requests(self, wanted: RequestUpdates) -> list[UpdateRequest | BlobRequest]:
        """Request whole updates, and only the missing payloads of those whose header is here."""
        unknown: list[int] = []
        requests: list[UpdateRequest | BlobRequest] = []
        for seq in range(wanted.first, wanted.last + 1):
            incomplete = self._incomplete.get((wanted.author, seq))
            if incomplete is None:
                unknown.append(seq)
                continue
            requests += [
                self._request_payload(incomplete, digest, wanted.to)
                for digest in incomplete.missing
                if digest not in incomplete.buffered
            ]
        if unknown:
            requests.append(UpdateRequest(author=wanted.author, first=unknown[0], last=unknown[-1]))
        return requests

    def _request_payload(
        self, incomplete: IncompleteUpdate, digest: str, source: str
    ) -> BlobRequest:
        """Request the rest of a payload; all of it if peers have sent false bytes together."""
        if self._pieces.request_from(digest, source):
            self._ledger.blobs.discard_partial(digest)
        present = incomplete.arrived[digest] = self._ledger.blobs.partial_size(digest)
        return BlobRequest(digest=digest, offset=present)

    # ---- headers

    def message_handlers(self) -> MessageHandlers:
        """Return what receives each type of message."""
        return {
            UpdatePush: self.on_update,
            BlobPart: self.on_part,
            BlobMissing: self.on_missing,
        }

    async def on_update(self, received: Received[UpdatePush]) -> None:
        """Receive an update's header, as fast as this peer may send them."""
        await received.connection.wait_for_update()
        now = asyncio.get_running_loop().time()
        update = await self.on_header(received.key, received.message, now)
        if update is not None and update.peer == self._gossip.membership.key:
            self._on_own_update(update)
        # Usually its payload follows at once, and gossip decides when that is here.
        if update is None or not self.is_waiting_for_payloads(update):
            self._wake()

    async def on_header(self, source: str, push: UpdatePush, now: float) -> Update | None:
        """Receive an update's header from peer `source`.

        Returns:
            The update, if it is new here.

        Raises:
            MessageError: When no peer should have passed it on.
        """
        signed = push.header
        update = self._validate_once(push)
        author = update.author
        seq = update.seq
        # Before anything else may run: gossip would probe an author whose header is here.
        is_answer = self._gossip.on_author(source, author)
        if is_answer and not push.has_payloads:  # a push may cross the probe on its way
            return update
        if await self._is_rival(signed, update):
            return None
        outcome = self._ledger.classify(signed, update)
        if outcome is Outcome.INCONSISTENT:
            raise MessageError(
                f"update {seq} of {update.peer[:8]} does not continue that author's last"
            )
        ticket = open_ticket(push.ticket, update.peer, self._rules)
        if outcome is Outcome.ADDED:
            self._validate_claim(update, ticket)
        # A header alone is no push that could be declined.
        if outcome is Outcome.DUPLICATE and push.has_payloads:
            self._gossip.on_update(source, author, seq, now)
        if outcome is Outcome.DUPLICATE and self._verdicts.waits_for_headers:
            await self._run_on_disk(self._ledger.peer_store.store_ticket, push.ticket)
        if outcome not in (Outcome.ADDED, Outcome.GAP):
            await self._on_unusable_header(outcome, signed, update, source, now)
            return update if outcome is Outcome.DIVERGENT else None
        known = self._incomplete.get((author, seq))
        if known is not None:
            if known.signed.body == signed.body:
                self._gossip.on_update(source, author, seq, now)
            else:
                fork = Fork(one=known.signed, other=signed, ticket=push.ticket)
                await self._verdicts.on_proof(fork)
            return None
        if not push.has_payloads and not self._ledger.verdicts.is_retracted(author, seq):
            # The answer to a probe that a push has overtaken, or a verdict that is not here yet.
            self._gossip.on_bare_header(source, author, seq, now)
            return update
        too_early = seq > self._ledger.head(author).seq + UPDATE_WINDOW
        if too_early or not self._make_room(update, ticket, now):
            self._record_unneeded(source, now)
            self._gossip.decline(source, author, seq)  # it is requested when its turn comes
            return update
        await self._start_receiving(
            IncompleteUpdate(push, update, ticket, source, missing={}, last_byte_at=now)
        )
        return update

    async def _is_rival(self, signed: Signed, update: Update) -> bool:
        """Return whether a header and a false one of its author are a fork, which is applied.

        An author that sends one machine another header than the rest, with payloads that do not
        match it, would cut that machine off from its later updates, which all others have.

        Raises:
            MessageError: When it is the false header: no honest peer passes it on.
        """
        false = self._false_headers.get(update.author)
        if false is None or false.update.seq != update.seq:
            return False
        if false.push.header.body == signed.body:
            raise MessageError(
                f"update {update.seq} of {update.peer[:8]} is not what its header says"
            )
        self._forget_false_header(update.author)
        known = false.push
        await self._verdicts.on_proof(Fork(one=known.header, other=signed, ticket=known.ticket))
        return True

    def _forget_false_header(self, author: str) -> None:
        """Forget an author's false header, and request its updates again."""
        del self._false_headers[author]
        self._gossip.permit_author(author)

    def _request_rivals(self) -> None:
        """Request the headers that others have in the place of false ones."""
        for author, false in self._false_headers.items():
            seq = false.update.seq
            for key in self._gossip.holders(author, seq):
                self._verdicts.request_headers(key, author, seq, seq)

    def _validate_once(self, push: UpdatePush) -> Update:
        """Return the update of a header; verify signatures only if that was not done lately.

        Every update comes from several peers, and a signature takes longer to verify than all else.

        Raises:
            MessageError: When it does not count.
        """
        signed, ticket = push.header, push.ticket
        name = (
            signed.key,
            signed.body,
            signed.signature,
            ticket.key,
            ticket.body,
            ticket.signature,
        )
        update = self._validated.get(name)
        if update is None:
            update = validate_header(signed, ticket, self._rules)
            self._validated[name] = update
            if len(self._validated) > MAX_VALIDATED:
                del self._validated[next(iter(self._validated))]
        return update

    def _record_unneeded(self, source: str, now: float) -> None:
        """Count a header that a peer sent for nothing.

        Raises:
            FloodError: When it sends more of them than can be underway by mistake.
        """
        if not self._unneeded.try_consume(source, 1, now):
            raise FloodError("it sends headers of updates that are here, again and again")

    def _validate_claim(self, update: Update, ticket: Ticket) -> None:
        """Check an update against its predecessor, which is its author's last in the ledger.

        Raises:
            MessageError: When it states more tokens than its ticket allows since then.
        """
        head = self._ledger.head(update.author)
        validate_claim(update, ticket, max(update.started_ms, head.time_ms))

    async def _start_receiving(self, incomplete: IncompleteUpdate) -> None:
        """Wait for the payloads of an update from now on."""
        update = incomplete.update
        author = update.author
        blobs = self._ledger.blobs
        blobs.pin(part.digest for part in update.fragments)
        is_retracted = self._ledger.verdicts.is_retracted(author, update.seq)
        parts = [] if is_retracted else update.fragments
        missing = {part.digest: part.size for part in parts if not blobs.has(part.digest)}
        incomplete.missing = missing
        incomplete.arrived = {digest: blobs.partial_size(digest) for digest in missing}
        self._incomplete[author, update.seq] = incomplete
        for digest in missing:
            self._waiting_for.setdefault(digest, set()).add((author, update.seq))
        self._gossip.on_update(incomplete.source, author, update.seq, incomplete.last_byte_at)
        if not missing:
            await self._complete(incomplete)

    async def _on_unusable_header(
        self, outcome: Outcome, signed: Signed, update: Update, source: str, now: float
    ) -> None:
        """Follow up a header that does not enter the ledger: it may prove, or lead to, a fork."""
        author = update.author
        seq = update.seq
        if outcome is Outcome.RETRACTED:
            self._gossip.on_request_failed(source, author, seq, now)
        elif outcome is Outcome.DUPLICATE and not self._verdicts.waits_for_headers:
            self._record_unneeded(source, now)
        elif outcome is Outcome.DUPLICATE:
            await self._verdicts.on_known_header(signed, update)
        elif outcome is Outcome.FORK:
            fork = self._ledger.fork_proof(signed, update)
            if fork is not None:
                await self._verdicts.on_proof(fork)
        elif outcome is Outcome.DIVERGENT:
            # A peer that has this one has the other half of a fork below it, or its author lies.
            self._gossip.on_request_failed(source, author, seq, now)
            self._verdicts.request_headers(source, author, seq - 1, seq - 1)

    def _make_room(self, update: Update, ticket: Ticket, now: float) -> bool:
        """Return whether another update of this volunteer may wait; drop others if need be.

        Headers that cost their author nothing must not exclude those of everybody else.
        """
        size = sum(part.size for part in update.fragments)
        name = (update.author, update.seq)
        dropped = self._transfers.reserve(name, ticket.volunteer, size, now)
        for author, seq in dropped or ():
            self._postpone(author, seq, now)
        return dropped is not None

    async def drop_expired(self) -> None:
        """Drop updates whose bytes do not arrive, now and then, until cancelled.

        One that is complete and waits for its time, its author's pace or earlier updates stays,
        within the same budget: its bytes would be downloaded again.
        """
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL)
            now = asyncio.get_running_loop().time()
            self._request_rivals()
            for author, seq in self._transfers.expired(now):
                incomplete = self._incomplete.get((author, seq))
                if incomplete is None or not incomplete.is_verified:
                    self._postpone(author, seq, now)

    def _postpone(self, author: str, seq: int, now: float) -> None:
        """Drop an update to make room; it is requested again later."""
        incomplete = self._incomplete.get((author, seq))
        if incomplete is not None:
            peer = incomplete.update.peer
            self._repeats.warn(f"dropped {peer}", "dropped update %d of %s for now", seq, peer[:8])
            self._gossip.on_request_failed(incomplete.source, author, seq, now)
        self._drop(author, seq)

    @contextlib.asynccontextmanager
    async def _dropping_on_error(self, updates: Sequence[IncompleteUpdate]) -> AsyncIterator[None]:
        """Drop these updates if an error keeps them from being stored, and raise it.

        They are requested again soon. Otherwise that would happen only once they expire, because
        all of their bytes have arrived. A `MessageError` is the sender's fault and drops nothing.
        """
        try:
            yield
        except MessageError:
            raise
        except Exception:
            now = asyncio.get_running_loop().time()
            for incomplete in updates:
                author, seq = incomplete.update.author, incomplete.update.seq
                if self._incomplete.get((author, seq)) is incomplete:
                    self._postpone(author, seq, now)
            raise

    # ---- payloads

    async def on_part(self, received: Received[BlobPart]) -> None:
        """Receive a piece of a payload, or of another blob that this machine fetches.

        Raises:
            FloodError: When nothing waits for it, too often.
            MessageError: When it is not a piece of what is waited for.
        """
        part, payload = received.message, received.payload
        if self._fetcher.wants(part.digest):
            await self._fetcher.on_part(received.key, part, payload)
            return
        match await self._receive_piece(received.key, part, payload, received.at):
            case PartOutcome.UNWANTED:
                received.connection.record_unwanted(len(payload))
            case PartOutcome.STORED:
                self._wake()

    def on_missing(self, received: Received[BlobMissing]) -> None:
        """Receive that a peer does not have a blob."""
        digest = received.message.digest
        for author, seq in self.updates_waiting_for(digest):
            self._gossip.on_request_failed(received.key, author, seq, received.at)
        self._fetcher.on_missing(received.key, digest, received.at)
        self._wake()

    async def _receive_piece(
        self, source: str, part: BlobPart, payload: memoryview, now: float
    ) -> PartOutcome:
        """Receive a piece of an update's payload.

        Raises:
            MessageError: When it is not a piece of the payload that the header names.
        """
        waiting = self.updates_waiting_for(part.digest)
        if not waiting:
            return PartOutcome.UNWANTED
        updates = [self._incomplete[identity] for identity in waiting]
        sizes = {update.missing[part.digest] for update in updates}
        if part.total not in sizes or part.offset + len(payload) > part.total:
            raise MessageError(
                f"a piece of {part.digest[:8]} says it has {part.total} bytes; "
                f"its header says {sizes}"
            )
        if not self._pieces.accepts(part.digest, source):
            return PartOutcome.IGNORED
        for identity, update in zip(waiting, updates, strict=True):
            arrived = update.record_piece(part, len(payload))
            if arrived.size:
                update.last_byte_at = now
                self._transfers.record_progress(identity, now)
            self._gossip.on_payload_bytes(source, *identity, now, arrived)
        piece = _Piece(part, payload, source)
        if not self._buffer_piece(updates, piece):
            await self._store_pieces(updates, [piece])
        elif updates[0].is_buffered:
            await self._store_pieces(updates, list(updates[0].buffered.values()))
        else:
            return PartOutcome.BUFFERED
        return PartOutcome.STORED

    def _buffer_piece(self, updates: list[IncompleteUpdate], piece: _Piece) -> bool:
        """Keep a small payload in memory until all of its update are here, if there is room.

        Then the disk's thread is visited once for an update, not for each of its payloads.

        Raises:
            MessageError: When it is not what its digest says.
        """
        part = piece.part
        size = len(piece.payload)
        update = updates[0]
        is_small = sum(other.size for other in update.update.fragments) <= MAX_BUFFERED_UPDATE
        if len(updates) > 1 or not is_small or size < part.total:
            return False
        if part.digest not in update.buffered:
            if self._buffered_bytes + size > MAX_BUFFERED_BYTES:
                return False
            if blake3(piece.payload).hexdigest() != part.digest:
                update.arrived.pop(part.digest, None)
                raise MessageError(_false_bytes(part.digest))
            self._buffered_bytes += size
            update.buffered[part.digest] = piece
        return True

    async def _store_pieces(self, updates: list[IncompleteUpdate], pieces: list[_Piece]) -> None:
        """Store pieces of payloads; if they complete an update, check and append it too.

        All that needs the disk is one visit to its thread: waking the threads costs more than most
        of what they do.

        Args:
            updates: The updates that wait for these pieces.
            pieces: The pieces; if there are several, one update waits for all of them.

        Raises:
            MessageError: When a payload is not what its digest says.
        """

        def store() -> tuple[list[AppendResult], _DiskResult]:
            # What is on its way is recorded before its first byte is stored.
            if new:
                self._ledger.expect_payloads([name for update in new for name in update.missing])
            results = [self._append_piece(piece) for piece in accepted]
            if last is None or set(results) != {AppendResult.COMPLETE}:
                return results, _DiskResult()
            return results, self._check_and_append(last, keep, append_is_due)

        async with self._queue.lock, self._dropping_on_error(updates):
            # Another peer may have completed them while this waited for the lock.
            updates = [update for update in updates if self._is_waiting(update, pieces)]
            if not updates:
                return
            # A payload may have begun again, from another peer.
            accepted = [
                piece for piece in pieces if self._pieces.accepts(piece.part.digest, piece.source)
            ]
            if not accepted:
                return
            new = [update for update in updates if not update.is_expected]
            digests = {piece.part.digest for piece in accepted}
            is_alone = len(updates) == 1
            last = updates[0] if is_alone and updates[0].missing.keys() <= digests else None
            keep = last is not None and self._fits_in_memory(last.update)
            append_is_due = last is not None and self._append_is_due(last)
            results, done = await self._run_on_disk(store)
            for update in new:
                update.is_expected = True
            self._release_buffered(updates[0], digests)
            if last is not None and done.is_checked:
                self._on_checked(last, done)
        if last is not None and done.is_checked:
            await self._after_check(last, done)
        for piece, result in zip(accepted, results, strict=True):
            if result is AppendResult.CORRUPT:
                self._on_false_bytes(piece)
            if result is AppendResult.COMPLETE:
                await self._on_payload_complete(piece.part.digest)

    def _on_false_bytes(self, piece: _Piece) -> None:
        """Request a payload again whose bytes were false.

        Raises:
            MessageError: When one peer sent all of it.
        """
        digest = piece.part.digest
        for identity in self._waiting_for.get(digest, ()):
            self._incomplete[identity].arrived.pop(digest, None)
        if self._pieces.on_corrupt(digest, piece.source):
            raise MessageError(_false_bytes(digest))
        self._repeats.warn(
            f"contested {digest}",
            "the bytes of %s that several peers sent are false: it begins again from one of them",
            digest[:8],
        )
        for identity in self._waiting_for.get(digest, ()):
            self._gossip.on_update_lost(*identity)

    def _is_waiting(self, update: IncompleteUpdate, pieces: list[_Piece]) -> bool:
        """Return whether an update still waits for one of these pieces."""
        identity = (update.update.author, update.update.seq)
        is_missing = any(piece.part.digest in update.missing for piece in pieces)
        return is_missing and self._incomplete.get(identity) is update

    def _append_piece(self, piece: _Piece) -> AppendResult:
        part = piece.part
        present = self._ledger.blobs.partial_size(part.digest)
        if part.offset <= present < part.offset + len(piece.payload):
            self._pieces.add(part.digest, piece.source, present)
        return self._ledger.blobs.append_piece(part.digest, part.offset, piece.payload, part.total)

    async def _on_payload_complete(self, digest: str) -> None:
        self._pieces.forget(digest)
        for identity in self._waiting_for.pop(digest, set()):
            incomplete = self._incomplete.get(identity)
            if incomplete is None or incomplete.missing.pop(digest, None) is None:
                continue
            if not incomplete.missing:
                await self._complete(incomplete)
            elif incomplete.is_buffered:
                await self._store_pieces([incomplete], list(incomplete.buffered.values()))

    def _release_buffered(self, update: IncompleteUpdate, digests: Collection[str]) -> None:
        """Keep these payloads of an update in memory no longer."""
        for digest in digests:
            piece = update.buffered.pop(digest, None)
            if piece is not None:
                self._buffered_bytes -= len(piece.payload)

    async def _complete(self, incomplete: IncompleteUpdate) -> None:
        """Check an update whose payloads are all here, and append it if that is due."""
        async with self._queue.lock, self._dropping_on_error([incomplete]):
            done = await self._run_on_disk(
                self._check_and_append,
                incomplete,
                self._fits_in_memory(incomplete.update),
                self._append_is_due(incomplete),
            )
            self._on_checked(incomplete, done)
        await self._after_check(incomplete, done)

    def _check_and_append(
        self, incomplete: IncompleteUpdate, keep: bool, append_is_due: bool
    ) -> _DiskResult:
        """Compare an update's payloads with its header, and append it, in the disk thread.

        Args:
            incomplete: The update.
            keep: Whether to return what the payloads decode to.
            append_is_due: Whether the update is its author's next and may enter the ledger now.
        """
        try:
            units, samples = self._decode_payloads(incomplete.update, keep)
        except MessageError as error:
            return _DiskResult(True, error=error, damaged=self._find_damaged(incomplete.update))
        outcome = None
        if append_is_due:
            (outcome,) = self._append([incomplete])
        return _DiskResult(True, units, samples, outcome=outcome)

    def _append(self, batch: list[IncompleteUpdate]) -> list[Outcome]:
        """Append an author's next updates with the tickets that they name, in the disk thread.

        Only these tickets are stored, for ever: a machine may have a new one as often as it asks.
        """
        for ready in batch:
            self._ledger.peer_store.store_ticket(ready.push.ticket)
        return self._ledger.append_all([(ready.signed, ready.update) for ready in batch])

    def _find_damaged(self, update: Update) -> tuple[str, ...]:
        """Return the payloads that the disk has changed since they arrived, in the disk thread."""
        blobs = self._ledger.blobs
        return tuple(
            part.digest
            for part in update.payload_parts
            if blobs.has(part.digest) and blobs.read_verified(part.digest) is None
        )

    def _append_is_due(self, incomplete: IncompleteUpdate) -> bool:
        """Return whether an update may enter the ledger once its payloads are right."""
        update = incomplete.update
        if not self._queue.is_open or update.seq != self._ledger.head(update.author).seq + 1:
            return False
        try:
            self._validate_claim(update, incomplete.ticket)
        except MessageError:
            return False
        return self._seconds_early(incomplete) <= 0

    def _on_checked(self, incomplete: IncompleteUpdate, done: _DiskResult) -> None:
        """Record what the disk thread did. The caller holds the queue's lock."""
        self._stop_waiting(incomplete)
        incomplete.missing.clear()
        if done.error is not None:
            return
        incomplete.units = done.units
        incomplete.samples = done.samples
        incomplete.is_verified = True
        identity = (incomplete.update.author, incomplete.update.seq)
        if done.outcome is Outcome.ADDED:
            now = self._clock()
            self._record_pace(incomplete, now)
            self._pace.on_batch(incomplete.update.peer, now)
            self._on_appended(incomplete)
        elif self._incomplete.get(identity) is incomplete:  # it was not dropped meanwhile
            self._gossip.on_update_buffered(*identity)

    async def _after_check(self, incomplete: IncompleteUpdate, done: _DiskResult) -> None:
        """Refuse an update that is wrong; else append what is ready of its author."""
        update = incomplete.update
        if done.damaged:  # neither its author nor the peer that sent it did this
            await self._run_on_disk(self._delete_payloads, done.damaged)
            self._postpone(update.author, update.seq, asyncio.get_running_loop().time())
        elif done.error is not None:
            reason = f"its update {update.seq} is not what its header says"
            self.ban_author(update.author, update.seq, reason)
            self._record_false_header(incomplete)
            self._disconnect(incomplete.source, str(done.error))
        elif done.outcome in (None, Outcome.ADDED):
            await self._append_ready(update.author)
        else:
            self._drop(update.author, update.seq)
            await self._reject(incomplete, done.outcome)

    def _delete_payloads(self, digests: Collection[str]) -> None:
        for digest in digests:
            log.error("the payload %s is damaged on the disk: it is received again", digest[:8])
            self._ledger.blobs.delete(digest)

    def _record_false_header(self, incomplete: IncompleteUpdate) -> None:
        """Remember a header that its payloads contradict: with another one it proves a fork."""
        update = incomplete.update
        before = self._false_headers.get(update.author)
        if before is not None and before.update.seq <= update.seq:
            return
        self._false_headers[update.author] = FalseHeader(incomplete.push, update)
        if len(self._false_headers) > MAX_FALSE_HEADERS:
            self._forget_false_header(next(iter(self._false_headers)))
        self._request_rivals()

    def _on_appended(self, appended: IncompleteUpdate) -> None:
        """Pass an update on that is in the ledger. The caller holds the queue's lock."""
        update = appended.update
        self._drop(update.author, update.seq)
        self._queue.append(
            anchor_entry(update, self._ledger.verdicts), appended.units, appended.samples
        )
        # Updates that come too fast are requested by those that want them: to push them would
        # delay those of everybody else.
        self._gossip.on_local_update(update.author, update.seq, is_urgent=not appended.is_ahead)

    def _record_pace(self, incomplete: IncompleteUpdate, now: float) -> None:
        """Count an update that enters the ledger in its author's pace."""
        incomplete.is_ahead = self._pace.is_ahead(incomplete.update.peer, now)
        self._pace.on_update(_describe_pace(incomplete))

    def _decode_payloads(self, update: Update, keep: bool) -> tuple[Units, Samples]:
        """Check an update's payloads, in the disk thread.

        Returns:
            What they decode to if `keep`, else nothing; and the elements by which it is judged.

        Raises:
            MessageError: When a payload is not what the header says.
        """
        if self._ledger.verdicts.is_retracted(update.author, update.seq):
            return (), ()
        decoded: list[torch.Tensor | None] = []
        samples: list[torch.Tensor | None] = []
        parts = zip(update.fragments, self._rules.sizes, strict=True)
        for fragment, (part, size) in enumerate(parts):
            units = sample = None
            if part.size:
                units = decode_payload(self._ledger.blobs.read(part.digest), part, size)
                sample = self._sample(fragment, units)
            decoded.append(units if keep else None)
            samples.append(sample)
        return decoded if keep else (), samples

    def _fits_in_memory(self, update: Update) -> bool:
        """Return whether an update's units fit among those that are kept in memory."""
        in_memory = self._queue.decoded_bytes + sum(
            count_bytes(incomplete.units) for incomplete in self._incomplete.values()
        )
        parts = zip(update.fragments, self._rules.sizes, strict=True)
        return in_memory + sum(4 * size for part, size in parts if part.size) <= MAX_DECODED_BYTES

    async def _append_ready(self, author: str) -> None:
        """Append this author's verified updates to the ledger and the queue, in order."""
        rejected: tuple[IncompleteUpdate, Outcome] | None = None
        async with self._queue.lock:
            while self._queue.is_open and rejected is None:
                batch, outcome = self._choose_batch(author)
                if not batch:
                    break
                if outcome is not Outcome.ADDED:
                    rejected = batch[0], outcome
                    break
                async with self._dropping_on_error(batch):
                    outcomes = await self._run_on_disk(self._append, batch)
                for ready, outcome in zip(batch, outcomes, strict=False):
                    if outcome is not Outcome.ADDED:
                        rejected = ready, outcome
                        break
                    self._on_appended(ready)
            if rejected is not None:
                self._drop(author, rejected[0].update.seq)
            head = self._ledger.head(author).seq
            for seq in self._incomplete_seqs(author):
                if seq <= head:
                    self._drop(author, seq)
        if rejected is not None:
            await self._reject(*rejected)

    def _choose_batch(self, author: str) -> tuple[list[IncompleteUpdate], Outcome]:
        """Choose an author's next updates to append, and count them in its pace.

        Returns:
            The updates, and what becomes of them: if it is not ADDED, they are only one.
        """
        batch: list[IncompleteUpdate] = []
        head = self._ledger.head(author)
        seq, time_ms = head.seq, head.time_ms
        now = self._clock()
        while len(batch) < UPDATE_WINDOW:
            ready = self._incomplete.get((author, seq + 1))
            if ready is None or not ready.is_verified:
                break
            paced = _describe_pace(ready)
            if batch and not (self._is_due(ready) and self._pace.fits_batch(paced, now)):
                break
            if not batch and self._is_early(ready):
                break
            # What its update states is no fault of a peer that has another update before it: that
            # is a fork. So it is compared with its predecessor only if it names this one.
            outcome = Outcome.ADDED if batch else self._ledger.classify(ready.signed, ready.update)
            if outcome is not Outcome.ADDED:
                return [ready], outcome
            try:
                validate_claim(ready.update, ready.ticket, max(ready.update.started_ms, time_ms))
            except MessageError:
                if batch:
                    break
                return [ready], Outcome.INCONSISTENT
            batch.append(ready)
            self._record_pace(ready, now)
            seq, time_ms = ready.update.seq, ready.update.time_ms
        if batch:
            self._pace.on_batch(batch[0].update.peer, now)
        return batch, Outcome.ADDED

    async def _reject(self, rejected: IncompleteUpdate, outcome: Outcome) -> None:
        """Follow up an update that did not enter the ledger, and that was dropped."""
        update = rejected.update
        author, seq = update.author, update.seq
        now = asyncio.get_running_loop().time()
        if outcome is Outcome.INCONSISTENT:
            reason = f"its update {seq} does not continue its last"
            self._gossip.on_request_failed(rejected.source, author, seq, now)
            self._disconnect(rejected.source, reason)
        else:
            await self._on_unusable_header(outcome, rejected.signed, update, rejected.source, now)

    def _seconds_ahead(self, incomplete: IncompleteUpdate) -> float:
        """Return the seconds until an update's time comes."""
        return incomplete.update.time_ms / 1000 - self._clock() - CLOCK_TOLERANCE

    def _is_due(self, incomplete: IncompleteUpdate) -> bool:
        """Return whether an update's time has come."""
        return self._seconds_ahead(incomplete) <= 0

    def _seconds_early(self, incomplete: IncompleteUpdate) -> float:
        """Return the seconds until an update's time comes, and its author's pace allows it."""
        now = self._clock()
        ready_at = self._pace.ready_at(_describe_pace(incomplete), now)
        return max(self._seconds_ahead(incomplete), ready_at - now)

    def _is_early(self, incomplete: IncompleteUpdate) -> bool:
        """Return whether an update is of a later time, or above its author's pace.

        It is not refused: clocks differ, and in the end every peer must have the same updates. It
        is appended when its time comes.
        """
        seconds = self._seconds_early(incomplete)
        if seconds <= 0:
            return False
        update = incomplete.update
        ahead = self._seconds_ahead(incomplete)
        if update.author not in self._waiting_for_time:
            self._waiting_for_time.add(update.author)
            if ahead > 0:
                reason = f"states a time that is {ahead + CLOCK_TOLERANCE:.0f} seconds ahead"
            else:
                reason = "is one of more than its machine can train"
            self._repeats.warn(
                f"early {update.peer}",
                "update %d of %s %s: it waits",
                update.seq,
                update.peer[:8],
                reason,
            )
            self._spawn(self._append_later(update.author, seconds))
        return True

    async def _append_later(self, author: str, seconds: float) -> None:
        await asyncio.sleep(min(seconds, MAX_WAIT))
        self._waiting_for_time.discard(author)
        await self._append_ready(author)

    # ---- what is dropped

    def drop_retracted(self) -> None:
        """Drop incomplete updates that a verdict names."""
        for author, seq in list(self._incomplete):
            if self._ledger.verdicts.is_retracted(author, seq):
                self._drop(author, seq)

    def ban_author(self, author: str, first: int, reason: str) -> None:
        """Request nothing of this author from update `first` on, and drop what waits of that.

        This update cannot enter any peer's ledger, and so neither can the later ones. Headers of it
        that peers push are still received: one with the same identity proves a fork.
        """
        log.error(
            "no updates of %s (%s) from %d on are requested: %s",
            author[:8],
            author[-16:],
            first,
            reason,
        )
        self._gossip.ban_author(author, first)
        for seq in self._incomplete_seqs(author):
            if seq >= first:
                self._drop(author, seq)

    def _incomplete_seqs(self, author: str) -> list[int]:
        return [seq for other, seq in self._incomplete if other == author]

    def _drop(self, author: str, seq: int) -> None:
        """Wait for this update no longer."""
        self._transfers.release((author, seq))
        incomplete = self._incomplete.pop((author, seq), None)
        if incomplete is None:
            return
        self._ledger.blobs.unpin(part.digest for part in incomplete.update.fragments)
        self._release_buffered(incomplete, list(incomplete.buffered))
        for digest in self._stop_waiting(incomplete):
            self._ledger.blobs.discard_partial(digest)
        if seq > self._ledger.head(author).seq and not self._will_delete:
            self._will_delete = True
            self._spawn(self._delete_unneeded())

    def _stop_waiting(self, incomplete: IncompleteUpdate) -> list[str]:
        """Let an update wait for no payload; return those for which no other update waits."""
        unwanted: list[str] = []
        for digest in incomplete.missing:
            waiting = self._waiting_for.get(digest)
            if waiting is None:
                continue
            waiting.discard((incomplete.update.author, incomplete.update.seq))
            if not waiting:
                del self._waiting_for[digest]
                self._pieces.forget(digest)
                unwanted.append(digest)
        return unwanted

    async def _delete_unneeded(self) -> None:
        """Delete payloads that are complete and belong to no update.

        It looks at all that are on their way, so that many dropped updates are one look.
        """
        await asyncio.sleep(DELETION_DELAY)
        self._will_delete = False
        await self._run_on_disk(self._ledger.delete_unneeded)


def _describe_pace(incomplete: IncompleteUpdate) -> PacedUpdate:
    """Return what its author's pace depends on, of an update."""
    update = incomplete.update
    return PacedUpdate(
        key=update.peer,
        begins=update.seq == 1,
        size=sum(part.size for part in update.fragments),
        time=update.time_ms / 1000,
        tokens_per_second=incomplete.ticket.max_tokens_per_second,
    )


def _false_bytes(digest: str) -> str:
    return f"the bytes of {digest[:8]} are not what their digest says"
