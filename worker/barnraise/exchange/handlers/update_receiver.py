"""Receive updates: a signed header, then its payloads in any order and from any peer.

An update enters the ledger and the queue to the training loop only when it is complete, checked and
durable. One that arrives before its author's earlier ones waits; how many may wait is bounded. All
methods run on the exchange's event loop; disk access and arithmetic run in the disk thread.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch

from barnraise.errors import MessageError
from barnraise.exchange.gossip.gossip import RequestUpdates
from barnraise.exchange.gossip.requests import AUTHOR_WINDOW
from barnraise.exchange.handlers.context import HandlerContext
from barnraise.exchange.handlers.transfer_budget import ReservedTotal, TransferBudget
from barnraise.exchange.handlers.update_queue import Units, UpdateQueue, count_bytes
from barnraise.exchange.handlers.verdict_handler import VerdictHandler
from barnraise.exchange.ledger.blob_store import AppendResult
from barnraise.exchange.ledger.diff import anchor_entry
from barnraise.exchange.ledger.ledger import Outcome
from barnraise.exchange.ledger.retention import payload_budget
from barnraise.exchange.ledger.validation import (
    UpdateRules,
    decode_payload,
    open_ticket,
    validate_claim,
    validate_header,
)
from barnraise.exchange.ledger.verdicts import Fork
from barnraise.exchange.network.repeated_warnings import RepeatedWarnings
from barnraise.exchange.pacing.author_pace import AuthorPace
from barnraise.protocol.messages import (
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
MAX_WAIT = 3600.0  # seconds until it is looked at again
MAX_DECODED_BYTES = 16 << 20  # decoded units that stay in memory until the training loop adds them


@dataclass
class IncompleteUpdate:
    """An update whose header is here and that is not in the ledger yet.

    Attributes:
        signed: The signed header.
        update: The header.
        ticket: The ticket that it names.
        source: The peer that sent the header.
        missing: Payload digest → bytes, of payloads that have not arrived.
        last_byte_at: Event loop time of its header or of its last byte.
        is_verified: Whether all payloads are here and match the header.
        units: What they decode to, where that is kept in memory.
    """

    signed: Signed
    update: Update
    ticket: Ticket
    source: str
    missing: dict[str, int]
    last_byte_at: float
    is_verified: bool = False
    units: Units = ()


class UpdateReceiver:
    """Collect incoming updates until they can enter the ledger."""

    def __init__(
        self,
        context: HandlerContext,
        rules: UpdateRules,
        queue: UpdateQueue,
        verdicts: VerdictHandler,
        clock: Callable[[], float],
        pace: AuthorPace,
    ) -> None:
        """Start without incomplete updates.

        Args:
            context: What the server's handlers share.
            rules: What headers are checked against.
            queue: Where changes wait for the training loop.
            verdicts: Receives proofs of forks, and headers that may lead to them.
            clock: Returns seconds since 1970, by the coordinators' clock.
            pace: How fast each author's updates enter the ledger.
        """
        self._clock = clock
        self._pace = pace
        self._spawn = context.spawn
        self._rules = rules
        self._ledger = context.ledger
        self._gossip = context.gossip
        self._run_on_disk = context.run_on_disk
        self._disconnect = context.disconnect
        self._queue = queue
        self._verdicts = verdicts
        self._incomplete: dict[tuple[str, int], IncompleteUpdate] = {}
        disk_budget = payload_budget(shutil.disk_usage(context.ledger.blobs.folder).free)
        self._transfers: TransferBudget[tuple[str, int]] = TransferBudget(
            ReservedTotal(int(INCOMPLETE_SHARE * disk_budget), MAX_INCOMPLETE),
            MAX_INCOMPLETE_OF_VOLUNTEER,
        )
        self._waiting_for: dict[str, set[tuple[str, int]]] = {}  # payload → (author, seq) of those
        self._repeats = RepeatedWarnings(log)
        self._waiting_for_time: set[str] = set()  # authors whose next update is of a later time

    @property
    def rules(self) -> UpdateRules:
        """What headers are checked against."""
        return self._rules

    def set_rules(self, rules: UpdateRules) -> None:
        """Replace the rules, which change with the mirror list."""
        self._rules = rules

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
                BlobRequest(digest=digest, offset=self._ledger.blobs.partial_size(digest))
                for digest in incomplete.missing
            ]
        if unknown:
            requests.append(UpdateRequest(author=wanted.author, first=unknown[0], last=unknown[-1]))
        return requests

    # ---- headers

    async def on_header(self, source: str, push: UpdatePush, now: float) -> Update | None:
        """Receive an update's header from peer `source`.

        Returns:
            The update, if it is new here.

        Raises:
            MessageError: When no peer should have passed it on.
        """
        signed = push.header
        update = validate_header(signed, push.ticket, self._rules)
        self._ledger.peer_store.store_ticket(push.ticket)
        author = update.author
        seq = update.seq
        if self._gossip.on_author(source, author):
            return update
        outcome = self._ledger.classify(signed, update)
        if outcome is Outcome.INCONSISTENT:
            raise MessageError(
                f"update {seq} of {update.peer[:8]} does not continue that author's last"
            )
        ticket = open_ticket(push.ticket, update.peer, self._rules)
        if outcome is Outcome.ADDED:
            self._validate_claim(update, ticket)
        if outcome is Outcome.DUPLICATE:
            self._gossip.on_update(source, author, seq, now)
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
        too_early = seq > self._ledger.head(author).seq + AUTHOR_WINDOW
        if too_early or not self._make_room(update, ticket, now):
            self._gossip.decline(source, author, seq)  # it is requested when its turn comes
            return update
        await self._start_receiving(
            IncompleteUpdate(signed, update, ticket, source, missing={}, last_byte_at=now)
        )
        return update

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
        self._incomplete[author, update.seq] = incomplete
        for digest in missing:
            self._waiting_for.setdefault(digest, set()).add((author, update.seq))
        self._gossip.on_update(incomplete.source, author, update.seq, incomplete.last_byte_at)
        if missing:
            await self._run_on_disk(self._ledger.expect_payloads, list(missing))
        else:
            await self._verify(incomplete)

    async def _on_unusable_header(
        self, outcome: Outcome, signed: Signed, update: Update, source: str, now: float
    ) -> None:
        """Follow up a header that does not enter the ledger: it may prove, or lead to, a fork."""
        author = update.author
        seq = update.seq
        if outcome is Outcome.RETRACTED:
            self._gossip.on_request_failed(source, author, seq, now)
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
        """Drop updates whose bytes do not arrive, now and then, until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL)
            now = asyncio.get_running_loop().time()
            for author, seq in self._transfers.expired(now):
                self._postpone(author, seq, now)

    def _postpone(self, author: str, seq: int, now: float) -> None:
        """Drop an update to make room; it is requested again later."""
        incomplete = self._incomplete.get((author, seq))
        if incomplete is not None:
            peer = incomplete.update.peer
            self._repeats.warn(f"dropped {peer}", "dropped update %d of %s for now", seq, peer[:8])
            self._gossip.on_request_failed(incomplete.source, author, seq, now)
        self._drop(author, seq)

    # ---- payloads

    async def on_part(self, source: str, part: BlobPart, payload: memoryview, now: float) -> bool:
        """Receive a piece of a payload.

        Returns:
            Whether an update waits for it.

        Raises:
            MessageError: When it is not a piece of the payload that the header names.
        """
        waiting = self.updates_waiting_for(part.digest)
        if not waiting:
            return False
        sizes = {self._incomplete[identity].missing[part.digest] for identity in waiting}
        if part.total not in sizes or part.offset + len(payload) > part.total:
            raise MessageError(
                f"a piece of {part.digest[:8]} says it has {part.total} bytes; "
                f"its header says {sizes}"
            )
        for author, seq in waiting:
            self._incomplete[author, seq].last_byte_at = now
            self._transfers.record_progress((author, seq), now)
            self._gossip.on_payload_bytes(source, author, seq, now)
        async with self._queue.lock:
            result = await self._run_on_disk(
                self._ledger.blobs.append_piece, part.digest, part.offset, payload, part.total
            )
        if result is AppendResult.CORRUPT:
            raise MessageError(f"the bytes of {part.digest[:8]} are not what their digest says")
        if result is AppendResult.COMPLETE:
            await self._on_payload_complete(part.digest)
        return True

    async def _on_payload_complete(self, digest: str) -> None:
        for identity in self._waiting_for.pop(digest, set()):
            incomplete = self._incomplete.get(identity)
            if incomplete is None or incomplete.missing.pop(digest, None) is None:
                continue
            if not incomplete.missing:
                await self._verify(incomplete)

    async def _verify(self, incomplete: IncompleteUpdate) -> None:
        """Check that all payloads are what the header says, then append what is ready."""
        update = incomplete.update
        try:
            async with self._queue.lock:
                incomplete.units = await self._run_on_disk(
                    self._decode_payloads, update, self._fits_in_memory(update)
                )
        except MessageError as error:
            reason = f"its update {update.seq} is not what its header says"
            self.ban_author(update.author, reason)
            self._disconnect(incomplete.source, str(error))
            return
        incomplete.is_verified = True
        self._gossip.on_update_buffered(update.author, update.seq)
        await self._append_ready(update.author)

    def _decode_payloads(self, update: Update, keep: bool) -> Units:
        """Check an update's payloads, in the disk thread.

        Returns:
            What they decode to if `keep`, else nothing.

        Raises:
            MessageError: When a payload is not what the header says.
        """
        if self._ledger.verdicts.is_retracted(update.author, update.seq):
            return ()
        decoded: list[torch.Tensor | None] = []
        for part, size in zip(update.fragments, self._rules.sizes, strict=True):
            units = None
            if part.size:
                units = decode_payload(self._ledger.blobs.read(part.digest), part, size)
            decoded.append(units if keep else None)
        return decoded if keep else ()

    def _fits_in_memory(self, update: Update) -> bool:
        """Return whether an update's units fit among those that are kept in memory."""
        in_memory = self._queue.decoded_bytes + sum(
            count_bytes(incomplete.units) for incomplete in self._incomplete.values()
        )
        parts = zip(update.fragments, self._rules.sizes, strict=True)
        return in_memory + sum(4 * size for part, size in parts if part.size) <= MAX_DECODED_BYTES

    async def _append_ready(self, author: str) -> None:
        """Append this author's verified updates to the ledger and the queue, in order."""
        rejected: tuple[Outcome, IncompleteUpdate] | None = None
        reason = ""
        async with self._queue.lock:
            while self._queue.is_open:
                ready = self._incomplete.get((author, self._ledger.head(author).seq + 1))
                if ready is None or not ready.is_verified or self._is_early(ready.update):
                    break
                try:
                    self._validate_claim(ready.update, ready.ticket)
                except MessageError as error:
                    reason = str(error)
                    self._drop(author, ready.update.seq)
                    rejected = Outcome.INCONSISTENT, ready
                    break
                outcome = await self._run_on_disk(self._ledger.append, ready.signed, ready.update)
                self._drop(author, ready.update.seq)
                self._record_pace(ready)
                if outcome is not Outcome.ADDED:
                    rejected = outcome, ready
                    break
                self._queue.append(anchor_entry(ready.update, self._ledger.verdicts), ready.units)
                self._gossip.on_local_update(author, ready.update.seq)
            head = self._ledger.head(author).seq
            for seq in self._incomplete_seqs(author):
                if seq <= head:
                    self._drop(author, seq)
        if rejected is None:
            return
        outcome, ready = rejected
        now = asyncio.get_running_loop().time()
        if outcome is Outcome.INCONSISTENT:
            reason = reason or f"its update {ready.update.seq} does not continue its last"
            self._gossip.on_request_failed(ready.source, author, ready.update.seq, now)
            self._disconnect(ready.source, reason)
        else:
            await self._on_unusable_header(outcome, ready.signed, ready.update, ready.source, now)

    def _is_early(self, update: Update) -> bool:
        """Return whether an update is of a later time, or above its author's pace.

        It is not refused: clocks differ, and in the end every peer must have the same updates. It
        is appended when its time comes.
        """
        now = self._clock()
        ahead = update.time_ms / 1000 - now - CLOCK_TOLERANCE
        seconds = max(ahead, self._pace.ready_at(update.peer) - now)
        if seconds <= 0:
            return False
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

    def _record_pace(self, appended: IncompleteUpdate) -> None:
        update = appended.update
        size = sum(part.size for part in update.fragments)
        rate = appended.ticket.max_tokens_per_second
        self._pace.on_update(update.peer, size, update.time_ms / 1000, rate)

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

    def ban_author(self, author: str, reason: str) -> None:
        """Accept nothing more of this author.

        Every peer that sees the same bytes decides the same.
        """
        log.error("further updates of %s (%s) are refused: %s", author[:8], author[-16:], reason)
        self._gossip.ban_author(author)
        for seq in self._incomplete_seqs(author):
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
        for digest in incomplete.missing:
            waiting = self._waiting_for.get(digest)
            if waiting is None:
                continue
            waiting.discard((author, seq))
            if not waiting:
                del self._waiting_for[digest]
                self._ledger.blobs.discard_partial(digest)
        if seq > self._ledger.head(author).seq:
            self._spawn(self._delete_unneeded())

    async def _delete_unneeded(self) -> None:
        """Delete payloads that are complete and belong to no update."""
        await self._run_on_disk(self._ledger.delete_unneeded)
