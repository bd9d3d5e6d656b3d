"""Receive updates: a signed header, then its payloads in any order and from any peer.

An update enters the ledger and the queue to the training loop only when it is complete, checked and
durable. One that arrives before its author's earlier ones waits; how many may wait is bounded. All
methods run on the exchange's event loop; disk access and arithmetic run in the disk thread.
"""

import asyncio
import logging

from barnraise.errors import FloodError, MessageError
from barnraise.exchange.gossip.gossip import RequestUpdates
from barnraise.exchange.gossip.handler_context import HandlerContext
from barnraise.exchange.gossip.requests import UPDATE_WINDOW
from barnraise.exchange.updates.false_headers import FalseHeaders
from barnraise.exchange.updates.incomplete_updates import (
    AuthorSeq,
    IncompleteTable,
    IncompleteUpdate,
    append_updates,
)
from barnraise.exchange.updates.payload_receiver import (
    CompleteUpdates,
    PayloadReceiver,
    ReceiverParts,
)
from barnraise.ledger.ledger import Outcome
from barnraise.ledger.update_queue import anchor_entry
from barnraise.ledger.validation import UpdateRules, open_ticket, validate_claim, validate_header
from barnraise.peering.limits.rate_limit import TokenBuckets
from barnraise.peering.limits.repeated_warnings import RepeatedWarnings
from barnraise.peering.limits.service_limits import SERVICE_LIMITS, Service
from barnraise.peering.links.received import MessageHandlers, Received
from barnraise.protocol.fork_proof import Fork
from barnraise.protocol.messages import (
    BlobRequest,
    Signed,
    Ticket,
    Update,
    UpdatePush,
    UpdateRequest,
)
from barnraise.protocol.table_sizes import FEW, store_newest

log = logging.getLogger("barnraise.exchange")

EXPIRY_INTERVAL = 30.0  # seconds between two looks for updates whose bytes do not arrive
# Seconds by which an update may be ahead of our clock. One that is further ahead waits.
CLOCK_TOLERANCE = 10.0
MAX_WAIT = 3600.0  # seconds until it is looked at again


class UpdateReceiver:
    """Collect incoming updates until they can enter the ledger.

    Attributes:
        payloads: Collects their payloads.
    """

    def __init__(
        self,
        context: HandlerContext,
        rules: UpdateRules,
        parts: ReceiverParts,
    ) -> None:
        self._clock = parts.clock
        self._pace = parts.pace
        self._on_own_update = parts.on_own_update
        self._wake = context.wake
        self._spawn = context.spawn
        self._rules = rules
        self._ledger = context.ledger
        self._gossip = context.gossip
        self._run_on_disk = context.run_on_disk
        self._disconnect = context.disconnect
        self._queue = parts.queue
        self._verdicts = parts.verdicts
        self._incomplete = IncompleteTable(context)
        self._false_headers = FalseHeaders(context.gossip, parts.verdicts)
        self.payloads = PayloadReceiver(
            context,
            self._incomplete,
            rules.sizes,
            parts,
            CompleteUpdates(
                append_is_due=self._append_is_due,
                on_verified=self._on_verified,
                follow_up=self._follow_up,
                on_false=self._on_false,
            ),
        )
        self._repeats = RepeatedWarnings()
        # Headers and their tickets, whose signatures are not verified again → their updates.
        self._validated: dict[tuple[Signed, Signed], Update] = {}
        self._unneeded = TokenBuckets(SERVICE_LIMITS[Service.UNNEEDED_HEADERS]["peer"])
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
    def incomplete(self) -> list[AuthorSeq]:
        """The (author, sequence number) of every update that is not in the ledger yet."""
        return [incomplete.identity for incomplete in self._incomplete.all()]

    async def start(self) -> None:
        """Let complete updates enter the ledger from now on; those that wait enter at once."""
        self._queue.open()
        for author in {author for author, _ in self.incomplete}:
            await self._append_ready(author)

    # ---- what is incomplete

    def updates_in_flight(self) -> list[Update]:
        """Return the updates whose headers are here and that are not in the ledger yet.

        Safe to call from another thread.
        """
        return [incomplete.update for incomplete in self._incomplete.all()]

    def build_requests(self, wanted: RequestUpdates) -> list[UpdateRequest | BlobRequest]:
        """Request whole updates, and only the missing payloads of those whose header is here."""
        unknown: list[int] = []
        requests: list[UpdateRequest | BlobRequest] = []
        for seq in range(wanted.first, wanted.last + 1):
            incomplete = self._incomplete.get(wanted.author, seq)
            if incomplete is None:
                unknown.append(seq)
                continue
            requests += [
                self.payloads.request(incomplete, digest, wanted.to)
                for digest in incomplete.missing
                if digest not in incomplete.buffered
            ]
        if unknown:
            requests.append(UpdateRequest(author=wanted.author, first=unknown[0], last=unknown[-1]))
        return requests

    # ---- headers

    def message_handlers(self) -> MessageHandlers:
        """Return what receives each type of message."""
        return {UpdatePush: self.on_update}

    async def on_update(self, received: Received[UpdatePush]) -> None:
        """Receive an update's header, as fast as this peer may send them."""
        await received.connection.wait_for_update()
        now = asyncio.get_running_loop().time()
        update = await self.on_header(received.key, received.message, now)
        if update is not None and update.peer == self._gossip.membership.key:
            self._on_own_update(update)
        # Usually its payload follows at once, and gossip decides when that is here.
        if update is None or self._incomplete.get(update.author, update.seq) is None:
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
        if await self._false_headers.prove_fork(signed, update):
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
            await self._run_on_disk(self._ledger.tickets.store, push.ticket)
        if outcome not in (Outcome.ADDED, Outcome.GAP):
            await self._on_unusable_header(outcome, signed, update, source, now)
            return update if outcome is Outcome.DIVERGENT else None
        known = self._incomplete.get(author, seq)
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
        if too_early or not self._incomplete.make_room(update, ticket, now):
            self._record_unneeded(source, now)
            self._gossip.decline(source, author, seq)  # it is requested when its turn comes
            return update
        await self._start_receiving(IncompleteUpdate(push, update, ticket, source), now)
        return update

    def _validate_once(self, push: UpdatePush) -> Update:
        """Return the update of a header; verify signatures only if that was not done lately.

        Every update comes from several peers, and a signature takes longer to verify than all else.

        Raises:
            MessageError: When it does not count.
        """
        signed, ticket = push.header, push.ticket
        update = self._validated.get((signed, ticket))
        if update is None:
            update = validate_header(signed, ticket, self._rules)
            store_newest(self._validated, (signed, ticket), update, FEW)
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

    async def _start_receiving(self, incomplete: IncompleteUpdate, now: float) -> None:
        """Wait for the payloads of an update from now on."""
        self._incomplete.add(incomplete)
        self._gossip.on_update(incomplete.source, *incomplete.identity, now)
        if not incomplete.missing:
            await self.payloads.check(incomplete)

    async def _on_unusable_header(
        self, outcome: Outcome, signed: Signed, update: Update, source: str, now: float
    ) -> None:
        """Follow up a header that does not enter the ledger: it may prove, or lead to, a fork."""
        author = update.author
        seq = update.seq
        if outcome is Outcome.RETRACTED:
            self._gossip.requests.on_failed(source, author, seq, now)
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
            self._gossip.requests.on_failed(source, author, seq, now)
            self._verdicts.request_headers(source, author, seq - 1, seq - 1)

    # ---- an author's order and pace

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

    def _on_verified(self, incomplete: IncompleteUpdate, outcome: Outcome | None) -> None:
        """Pass an update on whose payloads are right. The caller holds the queue's lock."""
        if outcome is Outcome.ADDED:
            now = self._clock()
            self._record_pace(incomplete, now)
            self._pace.on_batch(incomplete.update.peer, now)
            self._on_appended(incomplete)
        elif self._incomplete.contains(incomplete):  # it was not dropped meanwhile
            self._gossip.requests.on_buffered(*incomplete.identity)

    async def _follow_up(self, incomplete: IncompleteUpdate, outcome: Outcome | None) -> None:
        """Append what is ready of an author, or follow up its update that cannot be appended."""
        if outcome is None or outcome is Outcome.ADDED:
            await self._append_ready(incomplete.update.author)
        else:
            self._incomplete.drop(*incomplete.identity)
            await self._reject(incomplete, outcome)

    def _on_false(self, incomplete: IncompleteUpdate, error: MessageError) -> None:
        """Refuse an update that its payloads contradict."""
        update = incomplete.update
        reason = f"its update {update.seq} is not what its header says"
        self.ban_author(update.author, update.seq, reason)
        self._false_headers.record(incomplete)
        self._disconnect(incomplete.source, str(error))

    def _on_appended(self, appended: IncompleteUpdate) -> None:
        """Pass an update on that is in the ledger. The caller holds the queue's lock."""
        update = appended.update
        self._incomplete.drop(*appended.identity)
        self._queue.append(
            anchor_entry(update, self._ledger.verdicts), appended.units, appended.samples
        )
        # Updates that come too fast are requested by those that want them: to push them would
        # delay those of everybody else.
        self._gossip.on_local_update(update.author, update.seq, is_urgent=not appended.is_ahead)

    def _record_pace(self, incomplete: IncompleteUpdate, now: float) -> None:
        """Count an update that enters the ledger in its author's pace."""
        incomplete.is_ahead = self._pace.is_ahead(incomplete.update.peer, now)
        self._pace.on_update(incomplete.paced)

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
                async with self._incomplete.dropping_on_error(batch):
                    outcomes = await self._run_on_disk(append_updates, self._ledger, batch)
                for ready, outcome in zip(batch, outcomes, strict=False):
                    if outcome is not Outcome.ADDED:
                        rejected = ready, outcome
                        break
                    self._on_appended(ready)
            if rejected is not None:
                self._incomplete.drop(author, rejected[0].update.seq)
            head = self._ledger.head(author).seq
            for seq in self._incomplete.seqs(author):
                if seq <= head:
                    self._incomplete.drop(author, seq)
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
            ready = self._incomplete.get(author, seq + 1)
            if ready is None or not ready.is_verified:
                break
            paced = ready.paced
            if batch and (self._seconds_ahead(ready) > 0 or not self._pace.fits_batch(paced, now)):
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
            self._gossip.requests.on_failed(rejected.source, author, seq, now)
            self._disconnect(rejected.source, reason)
        else:
            await self._on_unusable_header(outcome, rejected.signed, update, rejected.source, now)

    def _seconds_ahead(self, incomplete: IncompleteUpdate) -> float:
        """Return the seconds until an update's time comes."""
        return incomplete.update.time_ms / 1000 - self._clock() - CLOCK_TOLERANCE

    def _seconds_early(self, incomplete: IncompleteUpdate) -> float:
        """Return the seconds until an update's time comes, and its author's pace allows it."""
        now = self._clock()
        ready_at = self._pace.ready_at(incomplete.paced, now)
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

    async def drop_expired(self) -> None:
        """Drop updates whose bytes do not arrive, now and then, until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL)
            now = asyncio.get_running_loop().time()
            self._false_headers.request_rivals()
            for author, seq in self._incomplete.expired(now):
                self._incomplete.postpone(author, seq, now)

    def drop_retracted(self) -> None:
        """Drop incomplete updates that a verdict names."""
        for author, seq in self.incomplete:
            if self._ledger.verdicts.is_retracted(author, seq):
                self._incomplete.drop(author, seq)

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
        for seq in self._incomplete.seqs(author):
            if seq >= first:
                self._incomplete.drop(author, seq)
