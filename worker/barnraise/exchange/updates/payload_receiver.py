"""Receive the payloads of incomplete updates, and compare complete ones with their headers.

The pieces of a payload may come from any peer. A small payload waits in memory for the others of
its update; then storing, checking and appending are one visit to the disk thread: waking the
threads costs more than most of what they do. All methods run on the exchange's event loop, but for
those that say so.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from blake3 import blake3

from barnraise.errors import MessageError
from barnraise.exchange.blobs.blob_fetcher import BlobFetcher
from barnraise.exchange.gossip.handler_context import HandlerContext
from barnraise.exchange.updates.incomplete_updates import (
    IncompleteTable,
    IncompleteUpdate,
    PayloadPiece,
    append_updates,
)
from barnraise.exchange.verdicts.verdict_handler import VerdictHandler
from barnraise.ledger.author_pace import AuthorPace
from barnraise.ledger.blob_store import AppendResult
from barnraise.ledger.ledger import Outcome
from barnraise.ledger.update_queue import Samples, Units, UpdateQueue, count_bytes
from barnraise.ledger.validation import decode_parts
from barnraise.peering.limits.repeated_warnings import RepeatedWarnings
from barnraise.peering.links.received import MessageHandlers, Received
from barnraise.protocol.messages import BlobMissing, BlobPart, BlobRequest, Update

log = logging.getLogger("barnraise.exchange")

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
class _DiskResult:
    """What one visit to the disk thread did with an update."""

    is_checked: bool = False  # whether all payloads are here and were compared with the header
    units: Units = ()  # what they decode to, where that is kept in memory
    samples: Samples = ()  # the elements by which the update is judged
    error: MessageError | None = None  # how they differ from the header, if they do
    # Digests of payloads that are no longer what they were when they arrived.
    damaged: tuple[str, ...] = ()
    # Of appending the update to the ledger; None if that was not due.
    outcome: Outcome | None = None


@dataclass(frozen=True)
class ReceiverParts:
    """What the receiver passes updates on to."""

    queue: UpdateQueue  # where changes wait for the training loop
    verdicts: VerdictHandler  # receives proofs of forks, and headers that may lead to them
    fetcher: BlobFetcher  # receives the pieces of blobs that are no update's payload
    pace: AuthorPace  # how fast each author's updates enter the ledger
    clock: Callable[[], float]  # returns seconds since 1970, by the coordinators' clock
    # Called with an update of this machine's key that a peer sends.
    on_own_update: Callable[[Update], None]
    # Returns the elements of a fragment's units by which an update is judged, in any thread.
    sample: Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class CompleteUpdates:
    """What is to happen with updates whose payloads are all here."""

    # Returns whether an update enters the ledger if its payloads are right.
    append_is_due: Callable[[IncompleteUpdate], bool]
    # Called with an update whose payloads are right and what became of appending it, None if that
    # was not due, while the queue's lock is held.
    on_verified: Callable[[IncompleteUpdate, Outcome | None], None]
    # Called with the same once the lock is free.
    follow_up: Callable[[IncompleteUpdate, Outcome | None], Awaitable[None]]
    # Called with an update that its payloads contradict, and how they differ.
    on_false: Callable[[IncompleteUpdate, MessageError], None]


class PayloadReceiver:
    """Collect the payloads of incomplete updates."""

    def __init__(
        self,
        context: HandlerContext,
        incomplete: IncompleteTable,
        sizes: Sequence[int],
        parts: ReceiverParts,
        complete: CompleteUpdates,
    ) -> None:
        self._ledger = context.ledger
        self._gossip = context.gossip
        self._run_on_disk = context.run_on_disk
        self._wake = context.wake
        self._incomplete = incomplete
        self._pieces = incomplete.pieces
        self._queue = parts.queue
        self._fetcher = parts.fetcher
        self._sizes = sizes
        self._sample = parts.sample
        self._complete = complete
        self._repeats = RepeatedWarnings()

    def request(self, incomplete: IncompleteUpdate, digest: str, source: str) -> BlobRequest:
        """Request the rest of a payload; all of it if peers have sent false bytes together."""
        if self._pieces.request_from(digest, source):
            self._ledger.blobs.discard_partial(digest)
        present = incomplete.arrived[digest] = self._ledger.blobs.partial_size(digest)
        return BlobRequest(digest=digest, offset=present)

    # ---- messages

    def message_handlers(self) -> MessageHandlers:
        """Return what receives each type of message."""
        return {BlobPart: self.on_part, BlobMissing: self.on_missing}

    async def on_part(self, received: Received[BlobPart]) -> None:
        """Receive a piece of a payload, or of another blob that this machine fetches.

        Raises:
            FloodError: When nothing waits for it, too often.
            MessageError: When it is not a piece of what is waited for.
        """
        part, payload = received.message, received.payload
        match await self._receive_piece(PayloadPiece(part, payload, received.key), received.at):
            case PartOutcome.UNWANTED if self._fetcher.wants(part.digest):
                await self._fetcher.on_part(received.key, part, payload)
            case PartOutcome.UNWANTED:
                received.connection.record_unwanted(len(payload))
            case PartOutcome.STORED:
                self._wake()

    def on_missing(self, received: Received[BlobMissing]) -> None:
        """Receive that a peer does not have a blob."""
        digest = received.message.digest
        for incomplete in self._incomplete.waiting_for(digest):
            self._gossip.requests.on_failed(received.key, *incomplete.identity, received.at)
        self._fetcher.on_missing(received.key, digest, received.at)
        self._wake()

    async def _receive_piece(self, piece: PayloadPiece, now: float) -> PartOutcome:
        """Receive a piece of an update's payload.

        Raises:
            MessageError: When it is not a piece of the payload that the header names.
        """
        part, payload, source = piece.part, piece.payload, piece.source
        updates = self._incomplete.waiting_for(part.digest)
        if not updates:
            return PartOutcome.UNWANTED
        sizes = {update.missing[part.digest] for update in updates}
        if part.total not in sizes or part.offset + len(payload) > part.total:
            raise MessageError(
                f"a piece of {part.digest[:8]} says it has {part.total} bytes; "
                f"its header says {sizes}"
            )
        if not self._pieces.accepts(part.digest, source):
            return PartOutcome.IGNORED
        for update in updates:
            arrived = update.record_piece(part, len(payload))
            if arrived.size:
                self._incomplete.transfers.record_progress(update.identity, now)
            self._gossip.requests.on_payload_bytes(source, *update.identity, now, arrived)
        if not self._buffer_piece(updates, piece):
            await self._store_pieces(updates, [piece])
        elif updates[0].is_buffered:
            await self._store_pieces(updates, list(updates[0].buffered.values()))
        else:
            return PartOutcome.BUFFERED
        return PartOutcome.STORED

    # ---- what is stored

    def _buffer_piece(self, updates: list[IncompleteUpdate], piece: PayloadPiece) -> bool:
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
            if self._incomplete.buffered_bytes + size > MAX_BUFFERED_BYTES:
                return False
            if blake3(piece.payload).hexdigest() != part.digest:
                update.arrived.pop(part.digest, None)
                raise MessageError(_false_bytes(part.digest))
            self._incomplete.buffer(update, piece)
        return True

    async def _store_pieces(
        self, updates: list[IncompleteUpdate], pieces: list[PayloadPiece]
    ) -> None:
        """Store pieces of payloads; if they complete an update, check and append it too.

        All that needs the disk is one visit to its thread: waking the threads costs more than most
        of what they do.

        Raises:
            MessageError: When a payload is not what its digest says.
        """

        def store() -> tuple[list[AppendResult], _DiskResult]:
            # What is on its way is recorded before its first byte is stored.
            if new:
                self._ledger.retention.expect_files(
                    [name for update in new for name in update.missing]
                )
            results = [self._append_piece(piece) for piece in accepted]
            if last is None or set(results) != {AppendResult.COMPLETE}:
                return results, _DiskResult()
            return results, self._check_and_append(last, keep, append_is_due)

        async with self._queue.lock, self._incomplete.dropping_on_error(updates):
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
            append_is_due = last is not None and self._complete.append_is_due(last)
            results, done = await self._run_on_disk(store)
            for update in new:
                update.is_expected = True
            self._incomplete.release_buffered(updates[0], digests)
            if last is not None and done.is_checked:
                self._on_checked(last, done)
        if last is not None and done.is_checked:
            await self._after_check(last, done)
        for piece, result in zip(accepted, results, strict=True):
            if result is AppendResult.CORRUPT:
                self._on_false_bytes(piece)
            if result is AppendResult.COMPLETE:
                await self._on_payload_complete(piece.part.digest)

    def _is_waiting(self, update: IncompleteUpdate, pieces: list[PayloadPiece]) -> bool:
        """Return whether an update still waits for one of these pieces."""
        is_missing = any(piece.part.digest in update.missing for piece in pieces)
        return is_missing and self._incomplete.contains(update)

    def _append_piece(self, piece: PayloadPiece) -> AppendResult:
        part = piece.part
        present = self._ledger.blobs.partial_size(part.digest)
        if part.offset <= present < part.offset + len(piece.payload):
            self._pieces.add(part.digest, piece.source, present)
        return self._ledger.blobs.append_piece(part.digest, part.offset, piece.payload, part.total)

    def _on_false_bytes(self, piece: PayloadPiece) -> None:
        """Request a payload again whose bytes were false.

        Raises:
            MessageError: When one peer sent all of it.
        """
        digest = piece.part.digest
        for incomplete in self._incomplete.waiting_for(digest):
            incomplete.arrived.pop(digest, None)
        if self._pieces.on_corrupt(digest, piece.source):
            raise MessageError(_false_bytes(digest))
        self._repeats.warn(
            f"contested {digest}",
            "the bytes of %s that several peers sent are false: it begins again from one of them",
            digest[:8],
        )
        for incomplete in self._incomplete.waiting_for(digest):
            self._gossip.requests.on_lost(*incomplete.identity)

    async def _on_payload_complete(self, digest: str) -> None:
        for identity in self._incomplete.pop_waiting(digest):
            incomplete = self._incomplete.get(*identity)
            if incomplete is None or incomplete.missing.pop(digest, None) is None:
                continue
            if not incomplete.missing:
                await self.check(incomplete)
            elif incomplete.is_buffered:
                await self._store_pieces([incomplete], list(incomplete.buffered.values()))

    # ---- what is complete

    async def check(self, incomplete: IncompleteUpdate) -> None:
        """Check an update whose payloads are all here, and append it if that is due."""
        async with self._queue.lock, self._incomplete.dropping_on_error([incomplete]):
            done = await self._run_on_disk(
                self._check_and_append,
                incomplete,
                self._fits_in_memory(incomplete.update),
                self._complete.append_is_due(incomplete),
            )
            self._on_checked(incomplete, done)
        await self._after_check(incomplete, done)

    def _check_and_append(
        self, incomplete: IncompleteUpdate, keep: bool, append_is_due: bool
    ) -> _DiskResult:
        """Compare an update's payloads with its header, and append it if due, in the disk thread.

        What the payloads decode to is returned if `keep`.
        """
        try:
            units, samples = self._decode_payloads(incomplete.update, keep)
        except MessageError as error:
            return _DiskResult(True, error=error, damaged=self._find_damaged(incomplete.update))
        outcome = None
        if append_is_due:
            (outcome,) = append_updates(self._ledger, [incomplete])
        return _DiskResult(True, units, samples, outcome=outcome)

    def _decode_payloads(self, update: Update, keep: bool) -> tuple[Units, Samples]:
        """Check an update's payloads, in the disk thread.

        Returns:
            What they decode to if `keep`, else nothing; and the elements by which it is judged.

        Raises:
            MessageError: When a payload is not what the header says.
        """
        if self._ledger.verdicts.is_retracted(update.author, update.seq):
            return (), ()
        read = self._ledger.blobs.read
        return decode_parts(update.fragments, self._sizes, read, self._sample, keep)

    def _find_damaged(self, update: Update) -> tuple[str, ...]:
        """Return the payloads that the disk has changed since they arrived, in the disk thread."""
        blobs = self._ledger.blobs
        return tuple(
            part.digest
            for part in update.payload_parts
            if blobs.has(part.digest) and blobs.read_verified(part.digest) is None
        )

    def _fits_in_memory(self, update: Update) -> bool:
        """Return whether an update's units fit among those that are kept in memory."""
        in_memory = self._queue.decoded_bytes + sum(
            count_bytes(incomplete.units) for incomplete in self._incomplete.all()
        )
        parts = zip(update.fragments, self._sizes, strict=True)
        return in_memory + sum(4 * size for part, size in parts if part.size) <= MAX_DECODED_BYTES

    def _on_checked(self, incomplete: IncompleteUpdate, done: _DiskResult) -> None:
        """Record what the disk thread did. The caller holds the queue's lock."""
        self._incomplete.stop_waiting(incomplete)
        incomplete.missing.clear()
        if done.error is not None:
            return
        incomplete.units = done.units
        incomplete.samples = done.samples
        incomplete.is_verified = True
        self._complete.on_verified(incomplete, done.outcome)

    async def _after_check(self, incomplete: IncompleteUpdate, done: _DiskResult) -> None:
        """Receive again what the disk has damaged; else follow up the update, right or wrong."""
        if done.damaged:  # neither its author nor the peer that sent it did this
            await self._run_on_disk(self._delete_payloads, done.damaged)
            now = asyncio.get_running_loop().time()
            self._incomplete.postpone(*incomplete.identity, now)
        elif done.error is not None:
            self._complete.on_false(incomplete, done.error)
        else:
            await self._complete.follow_up(incomplete, done.outcome)

    def _delete_payloads(self, digests: Collection[str]) -> None:
        for digest in digests:
            log.error("the payload %s is damaged on the disk: it is received again", digest[:8])
            self._ledger.blobs.delete(digest)


def _false_bytes(digest: str) -> str:
    return f"the bytes of {digest[:8]} are not what their digest says"
