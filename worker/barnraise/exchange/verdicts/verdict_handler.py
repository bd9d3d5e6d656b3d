"""Receive verdicts, forks and opinions: verify them, make them durable, retract what they name.

A machine that joined from a snapshot may lack headers of what it has to retract, and one that
pruned its ledger may lack payloads. Both are requested from the peers: headers are verified by the
one that follows them, which names their digest, up to one in our ledger; payloads by their digests.
A fork whose two headers follow different ones began earlier: then the header before is requested,
back to the first that differs. All methods run on the exchange's event loop.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from barnraise.errors import MessageError, UnprovenVerdictError
from barnraise.exchange.blobs.blob_fetcher import BlobFetcher, WantedBlob
from barnraise.exchange.gossip.handler_context import HandlerContext
from barnraise.exchange.gossip.requests import UPDATE_WINDOW
from barnraise.exchange.verdicts.verdict_sync import (
    CompareVerdicts,
    SendHeads,
    SendProofs,
    VerdictAction,
    VerdictSync,
)
from barnraise.ledger.anchor import Retraction
from barnraise.ledger.anchor_diff import anchor_retractions, missing_headers
from barnraise.ledger.ledger import VerdictChange
from barnraise.ledger.update_queue import UpdateQueue, anchor_entry
from barnraise.ledger.validation import UpdateRules
from barnraise.ledger.verdict_set import VerdictSet, verify_proof
from barnraise.peering.links.received import MessageHandlers, Received
from barnraise.protocol.clock import OWNER_CLOCK_SECONDS
from barnraise.protocol.fork_proof import Fork, Proof
from barnraise.protocol.messages import (
    FragmentUpdate,
    PeerState,
    Signed,
    Update,
    UpdateRequest,
)
from barnraise.protocol.opinions import SignedOpinions
from barnraise.protocol.table_sizes import FEW, SOME, store_newest
from barnraise.protocol.verdicts import SignedVerdict, VerdictNames, VerdictSummary
from barnraise.protocol.versions import is_understood

log = logging.getLogger("barnraise.exchange")

PAYLOAD_SECONDS = 30.0  # until the log says that a payload to retract is not available
FOLDER_SECONDS = 5.0  # between two reads of the folder of verdicts
FAREWELL_SECONDS = 0.5  # for an excluded peer to receive the verdict before its connection ends
MIN_OPINION_SECONDS = 1.0  # between two opinions of one machine that are received
STRANGERS_PATIENCE = 5  # times that, where nobody vouches for its volunteer
VERDICT_FOLDER = "verdicts"  # in the run's folder: where `barnraise verdict` leaves what it signed


class VerdictHandler:
    """Apply verdicts, from peers and from this machine's command line."""

    def __init__(
        self,
        context: HandlerContext,
        rules: UpdateRules,
        queue: UpdateQueue,
        fetcher: BlobFetcher,
        on_applied: Callable[[VerdictSet], None],
        clock: Callable[[], float],
    ) -> None:
        """Continue from the ledger's verdicts; `clock` returns seconds since 1970."""
        self._clock = clock
        self._rules = rules
        self._ledger = context.ledger
        self._gossip = context.gossip
        self._connections = context.connections
        self._run_on_disk = context.run_on_disk
        self._spawn = context.spawn
        self._disconnect = context.disconnect
        self._wake = context.wake
        self._queue = queue
        self._fetcher = fetcher
        self._on_applied = on_applied
        self._sync = VerdictSync()
        self.on_verdicts_replaced()
        self._checked_rules = rules  # by which the ledger's verdicts were checked last
        self._ignored: set[str] = set()  # unproven verdicts that the log names already
        self._opinions_at: dict[str, float] = {}  # machine → when its opinions came last
        self._payloads_awaited = 0  # retractions whose payloads are not here
        self._postponed: dict[str, VerdictSet] = {}  # by digest: they wait for headers
        self._spoiling: VerdictSet | None = None  # what cuts off a part of the base
        self._author_locks: dict[str, asyncio.Lock] = {}  # retractions of one author keep order
        self._retracting: set[asyncio.Task[None]] = set()

    def set_rules(self, rules: UpdateRules) -> None:
        """Replace the rules, which change with the mirror list.

        `send_due` then drops the verdicts that lack signatures by the new list.
        """
        self._rules = rules

    def message_handlers(self) -> MessageHandlers:
        """Return what receives each type of message."""
        return {
            SignedVerdict: self.on_peers_proof,
            Fork: self.on_peers_proof,
            SignedOpinions: self.on_peers_proof,
            VerdictSummary: self.on_summary,
            VerdictNames: self.on_names,
        }

    # ---- proofs

    async def on_peers_proof(self, received: Received[Proof]) -> None:
        """Receive a peer's verdict, proof of a fork or opinions.

        Raises:
            MessageError: When it proves nothing.
        """
        await self.on_proof(received.message, received.key)
        self._wake()

    async def on_proof(self, proof: Proof, source: str | None = None) -> None:
        """Receive a verdict, a fork or opinions, of a peer or of this machine, and verify them.

        Raises:
            UnprovenVerdictError: When this machine's own verdict lacks signatures.
            MessageError: When it proves nothing.
        """
        try:
            verdicts = await self._run_on_disk(verify_proof, proof, self._rules)
        except UnprovenVerdictError as error:
            if source is None:
                raise
            # Its sender may have another mirror list; ours is on its way, or its.
            if str(error) not in self._ignored and len(self._ignored) < FEW:
                self._ignored.add(str(error))
                log.warning("%s sends a verdict that does not count: %s", source[:8], error)
            return
        # Before the queue is open, a snapshot brings its own verdicts.
        if self._queue.is_open and not self._is_early(verdicts):
            await self._apply(verdicts, source)

    def _is_early(self, verdicts: VerdictSet) -> bool:
        """Return whether these are opinions of the future, or too soon after a machine's last.

        Peers send them again, so that all have the same ones in the end.
        """
        now = asyncio.get_running_loop().time()
        for key, statement in verdicts.statements.items():
            if statement.time_ms > 1000 * (self._clock() + OWNER_CLOCK_SECONDS):
                return True
            is_vouched = statement.volunteer in (self._ledger.verdicts.vouched or ())
            interval = MIN_OPINION_SECONDS * (1 if is_vouched else STRANGERS_PATIENCE)
            if now < self._opinions_at.get(key, -math.inf) + interval:
                return True
            store_newest(self._opinions_at, key, now, SOME)
        return False

    @property
    def waits_for_headers(self) -> bool:
        """Whether a verdict is postponed until headers from before the base arrive."""
        return bool(self._postponed)

    @property
    def has_spoiled_base(self) -> bool:
        """Whether a verdict cuts off what came with the base: `revert_base` should be called."""
        return self._spoiling is not None

    async def revert_base(self) -> bool:
        """Begin the ledger again at the anchor before the base. Updates are paused meanwhile.

        Returns:
            False when no verdict calls for it.
        """
        if self._spoiling is None or not self._ledger.spoils_base(self._spoiling):
            return False
        await self._run_on_disk(self._ledger.revert_base)
        log.warning("a verdict cuts off a part of the last snapshot: returning to the one before")
        return True

    async def apply_spoiling(self) -> None:
        """Apply the verdicts for which the ledger has returned to the anchor before its base."""
        verdicts, self._spoiling = self._spoiling, None
        if verdicts is not None:
            await self._apply(verdicts, None)

    async def on_known_header(self, signed: Signed, update: Update) -> None:
        """Receive a header that is already stored; a postponed verdict may wait for it."""
        if self._postponed and self._ledger.restore_header(signed, update):
            for verdicts in list(self._postponed.values()):
                await self._apply(verdicts, None, request_missing=False)

    def request_headers(self, peer: str | None, author: str, first: int, last: int) -> None:
        """Request an author's signed headers, last one first, from one peer or from all."""
        request = UpdateRequest(
            author=author, first=max(first, last - UPDATE_WINDOW + 1), last=last, headers=True
        )
        for connection in list(self._connections.values()):
            if peer in (None, connection.key):
                connection.send_message(request)

    async def _apply(
        self, verdicts: VerdictSet, source: str | None, request_missing: bool = True
    ) -> None:
        """Make verdicts durable and queue their retractions, or postpone them."""
        key = verdicts.digest or ""
        async with self._queue.lock:  # no update enters the ledger meanwhile
            applied = self._ledger.verdicts
            if applied.covers(verdicts) or not applied.has_room_for(verdicts):
                self._postponed.pop(key, None)
                return
            if await self._run_on_disk(self._ledger.spoils_base, verdicts):
                self._spoiling = verdicts | (self._spoiling or verdicts)
                return
            if self._retracting and self._ledger.returns_updates(applied | verdicts):
                return  # retractions that wait for payloads come first; peers send it again
            missing = await self._run_on_disk(missing_headers, self._ledger, verdicts)
            if not missing:
                self._postponed.pop(key, None)
                change = await self._run_on_disk(self._ledger.apply_verdicts, verdicts)
                await self._publish(verdicts, change, applied)
        if missing and request_missing and len(self._postponed) < FEW:
            self._postponed[key] = verdicts
            for author, first, last in missing:
                self.request_headers(source, author, first, last)

    async def _publish(
        self, verdicts: VerdictSet, change: VerdictChange, before: VerdictSet
    ) -> None:
        """Pass verdicts that are durable to everything that depends on them."""
        _log_verdicts(verdicts)
        _log_suspensions(before, self._ledger.verdicts)
        self._on_applied(verdicts)
        self._spawn(self._disconnect_excluded(verdicts))
        for author, (seq, fork) in verdicts.forks.items():
            self._on_fork(author, seq, fork)
        after = self._ledger.verdicts
        # A doubt that decides nothing yet cannot wait: each round does harm until a second one.
        is_urgent = (after.effect_digest, after.doubts) != (before.effect_digest, before.doubts)
        await self._publish_change(change, is_urgent)

    async def _publish_change(self, change: VerdictChange, changes_decisions: bool = True) -> None:
        """Pass what counts no longer, and what counts again, to gossip and the training loop."""
        changes = await self._run_on_disk(
            anchor_retractions, self._ledger, change.vector, change.retracted
        )
        now = asyncio.get_running_loop().time()
        if changes or change.returned or changes_decisions:
            self._gossip.on_verdicts(self._ledger.vector(), self._ledger.verdicts, now)
        self.on_verdicts_replaced(changes_decisions)
        if self._queue.is_open:
            for update in change.returned:
                self._queue.append(anchor_entry(update, self._ledger.verdicts))
        self.retract(changes)
        self.send_due(now)

    async def _disconnect_excluded(self, verdicts: VerdictSet) -> None:
        """Send the peers that new verdicts exclude these verdicts, then end their connections."""
        excluded = [
            connection
            for key, connection in self._connections.items()
            if verdicts.excludes(key, connection.ticket.volunteer)
        ]
        for connection in excluded:
            for proof in verdicts.names.values():
                connection.send_message(proof)
        await asyncio.sleep(FAREWELL_SECONDS if excluded else 0)
        for connection in excluded:
            self._disconnect(connection.key, "a verdict excludes it from the run")

    async def _drop_powerless(self, rules: UpdateRules) -> None:
        """Drop the verdicts that lack signatures by a new mirror list, with their effects."""
        async with self._queue.lock:
            change = await self._run_on_disk(self._ledger.drop_powerless_verdicts, rules)
            if change is not None:
                log.error("verdicts of mirrors that were expelled no longer count: updates return")
                await self._publish_change(change)

    def _on_fork(self, author: str, seq: int, fork: Fork) -> None:
        """Look for an earlier fork, and disconnect the author."""
        one = Update.model_validate_json(fork.one.body)
        other = Update.model_validate_json(fork.other.body)
        if one.previous != other.previous and seq > 1:
            self.request_headers(None, author, seq - 1, seq - 1)
        key, _, incarnation = author.partition(".")
        connection = self._connections.get(key)
        if connection is not None and connection.hello.incarnation == incarnation:
            self._disconnect(
                key, f"it signed two updates as number {seq}: nothing from there on counts"
            )

    # ---- retractions

    def retract(self, changes: list[Retraction]) -> None:
        """Queue retractions for the training loop as soon as their payloads are here."""
        for author in dict.fromkeys(change.update.author for change in changes):
            of_author = [change for change in changes if change.update.author == author]
            task = self._spawn(self._retract_in_order(author, of_author))
            self._retracting.add(task)
            task.add_done_callback(self._retracting.discard)

    def cancel_retractions(self) -> None:
        """Cancel what waits for payloads; the next `retract` is given all of it again."""
        for task in self._retracting:
            task.cancel()

    async def _retract_in_order(self, author: str, changes: list[Retraction]) -> None:
        async with self._author_locks.setdefault(author, asyncio.Lock()):
            for change in changes:
                for part in change.update.fragments if change.multiplier else ():
                    if not self._ledger.blobs.has(part.digest):
                        await self._fetch_payload(change.update, part)
                self._queue.append(change)

    async def _fetch_payload(self, update: Update, part: FragmentUpdate) -> None:
        """Wait until a peer has sent a payload that is to be retracted."""
        self._payloads_awaited += 1
        logged = False
        wanted = [WantedBlob(part.digest, part.size, part.size)]
        try:
            while not await self._fetcher.fetch(wanted, PAYLOAD_SECONDS):
                if not logged:
                    log.error(
                        "update %d of %s must come out, and nobody here has it: this machine's "
                        "anchor is not the others'",
                        update.seq,
                        update.peer[:8],
                    )
                    logged = True
        finally:
            self._payloads_awaited -= 1

    # ---- with the peers

    def without_retracted(self, state: PeerState) -> PeerState:
        """Return a peer's State without the updates that verdicts name."""
        verdicts = self._ledger.verdicts
        if not verdicts.cuts_off_authors:
            return state
        return state.model_copy(update={"vector": verdicts.clamp(state.vector)})

    def on_state(self, key: str, state: PeerState) -> bool:
        """Compare a peer's verdicts and headers with ours, after gossip received its State.

        Returns:
            Whether they differ, so that something may have to be sent.
        """
        if state.verdicts_digest == self.digest_for(key):
            digest = self._ledger.verdicts.digest
            state = state.model_copy(update={"verdicts_digest": digest})
        link = self._gossip.links.get(key)
        same_vector = link is not None and link.vector == self._gossip.vector
        return self._sync.on_state(key, state, same_vector, self._ledger.heads_digest)

    def digest_for(self, key: str) -> str | None:
        """Return the digest of our verdicts by which a peer with the same ones finds them equal."""
        connection, verdicts = self._connections.get(key), self._ledger.verdicts
        if connection is None or is_understood("signed_opinions", connection.protocol):
            return verdicts.digest
        return verdicts.decisions_digest

    def on_disconnected(self, key: str) -> None:
        """Record that the connection to this peer ended."""
        self._sync.on_disconnected(key)

    def send_due(self, now: float) -> None:
        """Send verdicts and headers to the peers that differ from us."""
        if self._rules is not self._checked_rules:
            self._checked_rules = self._rules
            self._spawn(self._drop_powerless(self._rules))
        self._perform(self._sync.next_actions(now))

    def on_summary(self, received: Received[VerdictSummary]) -> None:
        """Answer a peer's summary of its verdicts."""
        self._perform(self._sync.on_summary(received.key, received.message, received.at))

    def on_names(self, received: Received[VerdictNames]) -> None:
        """Answer the names of a peer's verdicts."""
        self._perform(self._sync.on_names(received.key, received.message, received.at))

    def _perform(self, actions: list[VerdictAction]) -> None:
        proofs = self._ledger.verdicts.names
        for action in actions:
            connection = self._connections.get(action.to)
            if connection is None:
                continue
            match action:
                case CompareVerdicts():
                    connection.send_message(action.message)
                case SendProofs():
                    for name in action.names:
                        if name in proofs:
                            connection.send_message(proofs[name])
                case SendHeads():
                    for author, seq in self._gossip.sample_heads(action.count):
                        connection.send_update(author, seq, whole=False)

    def on_verdicts_replaced(self, changes_decisions: bool = True) -> None:
        """Continue from the ledger's verdicts, which have been replaced.

        Opinions that decide nothing yet change with most rounds of a run's beginning: peers that
        were sent some lately get them together with the next ones.
        """
        verdicts = self._ledger.verdicts
        sizes = {name: _count_bytes(proof) for name, proof in verdicts.names.items()}
        self._sync.on_verdicts(verdicts.digest, sizes, changes_decisions)

    @property
    def is_converged(self) -> bool:
        """Whether all connected peers have our verdicts and no retraction waits."""
        return not self._payloads_awaited and all(
            self._sync.has_same_verdicts(key) for key in list(self._connections)
        )

    # ---- this machine's own verdicts

    async def watch_folder(self) -> None:
        """Apply the verdicts that `barnraise verdict` leaves for this worker, until cancelled."""
        folder = self._ledger.blobs.folder.parent / VERDICT_FOLDER
        while True:
            try:
                for path in sorted(folder.glob("*.json")) if self._queue.is_open else ():
                    await self._apply_file(path)
            except OSError as error:
                log.warning("%s cannot be read: %s", folder, error)
            await asyncio.sleep(FOLDER_SECONDS)

    async def _apply_file(self, path: Path) -> None:
        try:
            verdict = SignedVerdict.model_validate_json(path.read_bytes())
            await self.on_proof(verdict)
        except (MessageError, ValidationError) as error:
            log.error("the verdict in %s is refused: %s", path, error)
            path.replace(path.with_suffix(".refused"))
            return
        if self._ledger.verdicts.covers(VerdictSet.from_proof(verdict)):
            path.unlink(missing_ok=True)


def _count_bytes(proof: Proof) -> int:
    """Return the bytes of a proof; of opinions, which often change, those of their texts."""
    if isinstance(proof, SignedOpinions):
        return len(proof.opinions.body) + len(proof.ticket.body)
    return len(proof.model_dump_json())


def _log_suspensions(before: VerdictSet, after: VerdictSet) -> None:
    for volunteer in after.suspended.keys() - before.suspended.keys():
        log.error(
            "the updates of volunteer %s are withheld: machines that are vouched for find that "
            "they do not agree with their own. The run's owner can exclude or clear the volunteer",
            volunteer[:8],
        )
    for volunteer in before.suspended.keys() - after.suspended.keys():
        log.warning("the updates of volunteer %s are no longer withheld", volunteer[:8])


def _log_verdicts(verdicts: VerdictSet) -> None:
    for author, limit in verdicts.limits.items():
        if author in verdicts.forks:
            reason = "it signed two updates with one identity"
        else:
            reason = "a verdict says so"
        log.error(
            "of %s (%s) nothing after update %d is taken: %s",
            author[:8],
            author[-16:],
            limit,
            reason,
        )
    for parties, kind in (
        (verdicts.excluded_keys, "the machine"),
        (verdicts.excluded_volunteers, "the volunteer"),
    ):
        for party in parties:
            log.error("%s %s is excluded from the run: a verdict says so", kind, party[:8])
    for author, updates in verdicts.singles.items():
        log.error(
            "of %s (%s) the updates %s come out: a verdict says so",
            author[:8],
            author[-16:],
            [*updates],
        )
