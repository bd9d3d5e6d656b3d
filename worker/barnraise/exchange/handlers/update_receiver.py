"""Updates on their way in: a signed header, then its payloads in any order and from anybody, then the ledger.

What is in the ledger and in `arrived` is whole, checked and durable. Updates that come before their author's earlier
ones wait; how many may is bounded. Runs on the exchange's event loop; disk and arithmetic go to the `disk` thread.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from barnraise.errors import MessageError, StateError
from barnraise.exchange.compression.codec import decode
from barnraise.exchange.gossip.gossip import Gossip, RequestUpdates
from barnraise.exchange.gossip.requests import AUTHOR_WINDOW
from barnraise.exchange.ledger.anchor import Retraction
from barnraise.exchange.ledger.blob_store import AppendResult, BlobStore
from barnraise.exchange.ledger.diff import anchor_entry
from barnraise.exchange.ledger.ledger import Ledger, Outcome
from barnraise.exchange.ledger.validation import UpdateRules, decode_payload, validate_header
from barnraise.exchange.ledger.verdicts import Fork
from barnraise.protocol.messages import (
    BlobPart,
    BlobRequest,
    FragmentUpdate,
    Signed,
    Update,
    UpdatePush,
    UpdateRequest,
)

log = logging.getLogger("barnraise.exchange")

PENDING = 512  # headers whose payloads, or predecessors, are awaited
PENDING_OF_ONE = 2 * AUTHOR_WINDOW  # …of one machine, in all its incarnations
STALE = 60.0  # seconds without a byte after which one makes room for others
DECODED = 16 << 20  # bytes of integers kept from the check of payloads until the loop adds them

Units = Sequence[torch.Tensor | None]  # int32[size] of each fragment that is said; empty: not kept


@dataclass(frozen=True)
class ReceivedUpdate:
    """A change that is in the ledger and not yet in the anchor: an update, or one that comes out again.

    `refetch(digest, size)` gets a payload from the others, waiting for it; whether it came. `units`: what its payloads
    decode to, where that is known already."""

    header: Update | Retraction
    sizes: tuple[int, ...]
    blobs: BlobStore
    refetch: Callable[[str, int], bool] = lambda digest, size: False
    units: Units = ()

    @property
    def retracts(self) -> bool:
        """Whether it takes out what is in the anchor."""
        return isinstance(self.header, Retraction) and self.header.multiplier < 0

    def decode(self, index: int) -> torch.Tensor | None:
        """int32[size] units to add to fragment `index`; None where it says nothing of it. Raises StateError when the
        disk gives other bytes back, and nobody else has the right ones."""
        update, times = self.header, 1
        if isinstance(update, Retraction):
            update, times = update.update, update.multiplier
        part = update.fragments[index]
        if times == 0 or not part.size:
            return None
        if times > 0 and self.units:
            return self.units[index].clone()  # whoever gets it may change it
        units = decode(self._payload(update, part), self.sizes[index])
        return units if times > 0 else units.neg_()

    def _payload(self, update: Update, part: FragmentUpdate) -> bytes:
        if (payload := self.blobs.read_verified(part.digest)) is not None:
            return payload
        what = f"{self.blobs.path(part.digest)}, a part of update {update.seq} of {update.peer[:8]}, is damaged"
        log.error("%s: asking the others for it", what)
        self.blobs.delete(part.digest)
        payload = (
            self.blobs.read_verified(part.digest) if self.refetch(part.digest, part.size) else None
        )
        if payload is None:
            raise StateError(f"{what}: join again from an empty folder")
        return payload


@dataclass
class Pending:
    signed: Signed
    update: Update
    source: str  # the peer that sent the header
    missing: dict[str, int]  # payload digest → bytes
    moved: float  # loop time of its header, or of its last byte
    whole: bool = False  # all payloads are here and are what the header says
    units: Units = ()  # what they decode to


class Judge(Protocol):
    """Where proofs, and what leads to them, are handed: see `court.py`."""

    async def take(self, proof: Fork, source: str | None = None) -> None: ...

    async def recalled(self, signed: Signed, update: Update) -> None: ...

    def ask(self, peer: str | None, author: str, first: int, last: int) -> None: ...


class UpdateReceiver:
    def __init__(
        self,
        rules: UpdateRules,
        ledger: Ledger,
        gossip: Gossip,
        disk: Callable[..., Awaitable],
        blame,
    ):
        """`disk` runs a call beside the loop; `blame(peer, reason)` is told who passed on what nobody should."""
        self.rules, self._ledger, self._gossip, self._disk, self._blame = (
            rules,
            ledger,
            gossip,
            disk,
            blame,
        )
        self.arrived: deque[ReceivedUpdate] = deque()
        self.refetch: Callable[[str, int], bool] = lambda digest, size: (
            False
        )  # set by whoever can wait
        self.court: Judge  # set by the court itself
        self.open = False  # whether whole updates go into the ledger (not while a snapshot is being fetched)
        self._tickets = ledger.peer_store.tickets()
        self._pending: dict[tuple[str, int], Pending] = {}
        self._wanted: dict[str, set[tuple[str, int]]] = {}
        self.turn = asyncio.Lock()  # one update is checked and entered at a time

    async def begin(self) -> None:
        """From now on whole updates enter the ledger; those that waited do at once."""
        self.open = True
        for author in {author for author, _ in self._pending}:
            await self._enter(author)

    async def pause(self) -> None:
        """What is whole waits from now on; what has come and was not taken is forgotten: it is in the ledger."""
        async with self.turn:
            self.open = False
            self.arrived.clear()

    def met(self, peer: str, ticket: Signed) -> None:
        """A peer showed its ticket: its updates can be accepted, and passed on."""
        if self._tickets.get(peer) != ticket:
            self._tickets[peer] = ticket
            self._ledger.peer_store.store_ticket(peer, ticket)

    def ticket(self, peer: str) -> Signed | None:
        return self._tickets.get(peer)

    def missing(self, author: str, seq: int) -> list[str] | None:
        """Payloads still awaited of an update whose header is here; None when its header is not."""
        pending = self._pending.get((author, seq))
        return list(pending.missing) if pending else None

    def under_way(self) -> list[Update]:
        """Updates whose headers are here and that are not in the ledger yet, for whatever reason. Safe to call from
        another thread."""
        return [pending.update for pending in list(self._pending.values())]

    def needing(self, blob: str) -> list[tuple[str, int]]:
        return list(self._wanted.get(blob, ()))

    async def header(self, source: str, push: UpdatePush, now: float) -> Update | None:
        """Takes a header; returns the update if it is news. Raises MessageError for one nobody should pass on."""
        signed = push.header
        ticket = self._tickets.get(signed.key) or push.ticket
        update = validate_header(signed, ticket, self.rules)
        self.met(update.peer, ticket)
        author, seq = update.author, update.seq
        outcome = self._ledger.classify(signed, update)
        if outcome is Outcome.WRONG_TOTAL:
            self._cut(author, f"its update {seq} does not continue its last")
            raise MessageError(
                f"update {seq} of {update.peer[:8]} does not continue that author's last"
            )
        if outcome is Outcome.DUPLICATE:
            self._gossip.on_update(source, author, seq, now)
        if outcome not in (Outcome.ADDED, Outcome.GAP):
            await self._strange(outcome, signed, update, source, now)
            return update if outcome is Outcome.DIVERGENT else None
        if pending := self._pending.get((author, seq)):
            if pending.signed.body == signed.body:
                self._gossip.on_update(source, author, seq, now)
            else:
                await self.court.take(Fork(one=pending.signed, other=signed, ticket=ticket))
            return None
        if seq > self._ledger.head(author).seq + AUTHOR_WINDOW or not self._room(update.peer, now):
            self._gossip.decline(source, author, seq)
            return update  # it will be asked for when its turn comes
        blobs = self._ledger.blobs
        blobs.pin(part.digest for part in update.fragments)
        parts = [] if self._ledger.verdicts.is_retracted(author, seq) else update.fragments
        missing = {part.digest: part.size for part in parts if not blobs.has(part.digest)}
        self._pending[author, seq] = pending = Pending(signed, update, source, missing, now)
        for blob in missing:
            self._wanted.setdefault(blob, set()).add((author, seq))
        self._gossip.on_update(source, author, seq, now)
        if not missing:
            await self._check(pending)
        return update

    async def _strange(
        self, outcome: Outcome, signed: Signed, update: Update, source: str, now: float
    ) -> None:
        """A header that does not go in, and what that says of its author."""
        author, seq = update.author, update.seq
        if outcome is Outcome.DUPLICATE:
            await self.court.recalled(signed, update)
        elif outcome is Outcome.FORK:
            if fork := self._ledger.fork_proof(signed, update):
                await self.court.take(fork)
        elif (
            outcome is Outcome.DIVERGENT
        ):  # who holds it has the other half of a fork below it, or its author lies
            self._gossip.on_request_failed(source, author, seq, now)
            self.court.ask(source, author, seq - 1, seq - 1)

    def _room(self, peer: str, now: float) -> bool:
        """Whether one more may wait. What nobody has sent a byte of for STALE seconds makes room: headers that cost
        their author nothing must not keep everybody else's out."""
        others = [identity for identity, each in self._pending.items() if each.update.peer == peer]
        crowd = others if len(others) >= PENDING_OF_ONE else list(self._pending)
        if len(others) < PENDING_OF_ONE and len(self._pending) < PENDING:
            return True
        oldest = min(crowd, key=lambda identity: self._pending[identity].moved)
        if now < self._pending[oldest].moved + STALE:
            return False
        self._forget(*oldest)
        return True

    async def part(self, source: str, part: BlobPart, payload: memoryview, now: float) -> bool:
        """Takes a piece of a payload; whether it was one that is awaited. Raises MessageError for a wrong one."""
        needing = self.needing(part.digest)
        if not needing:
            return False
        sizes = {self._pending[identity].missing[part.digest] for identity in needing}
        if part.total not in sizes or part.offset + len(payload) > part.total:
            raise MessageError(
                f"a piece of {part.digest[:8]} says it has {part.total} bytes; its header says {sizes}"
            )
        for author, seq in needing:
            self._pending[author, seq].moved = now
            self._gossip.on_payload_bytes(source, author, seq, now)
        async with self.turn:
            growth = await self._disk(
                self._ledger.blobs.append_piece, part.digest, part.offset, payload, part.total
            )
        if growth is AppendResult.CORRUPT:
            raise MessageError(f"the bytes of {part.digest[:8]} are not what their digest says")
        if growth is AppendResult.COMPLETE:
            for identity in self._wanted.pop(part.digest, set()):
                pending = self._pending.get(identity)
                if (
                    pending
                    and pending.missing.pop(part.digest, None) is not None
                    and not pending.missing
                ):
                    await self._check(pending)
        return True

    async def _check(self, pending: Pending) -> None:
        """All payloads are here: are they what the header says?"""
        update = pending.update
        try:
            async with self.turn:
                pending.units = await self._disk(self._checked, update, self._keeps(update))
        except MessageError as error:
            self._cut(update.author, f"its update {update.seq} is not what its header says")
            self._blame(pending.source, str(error))
            return
        pending.whole = True
        self._gossip.on_update_buffered(update.author, update.seq)
        await self._enter(update.author)

    def _checked(self, update: Update, keep: bool) -> Units:
        """What an update's payloads decode to, if it is to be kept. Raises MessageError."""
        if self._ledger.verdicts.is_retracted(update.author, update.seq):
            return ()
        units: list[torch.Tensor | None] = []
        for part, size in zip(update.fragments, self.rules.sizes, strict=True):
            said = (
                decode_payload(self._ledger.blobs.read(part.digest), part, size)
                if part.size
                else None
            )
            units.append(said if keep else None)
        return units if keep else ()

    def _keeps(self, update: Update) -> bool:
        """Whether there is room for an update's integers beside those that are kept."""
        kept = [
            *(each.units for each in self._pending.values()),
            *(each.units for each in self.arrived),
        ]
        there = sum(said.nbytes for units in kept for said in units if said is not None)
        parts = zip(update.fragments, self.rules.sizes, strict=True)
        return there + sum(4 * size for part, size in parts if part.size) <= DECODED

    async def _enter(self, author: str) -> None:
        """Whole updates that are next in their author's order go into the ledger, and to the loop."""
        odd: tuple[Outcome, Pending] | None = None
        async with self.turn:
            while self.open and (
                pending := self._pending.get((author, self._ledger.head(author).seq + 1))
            ):
                if not pending.whole:
                    break
                outcome = await self._disk(self._ledger.append, pending.signed, pending.update)
                self._forget(author, pending.update.seq)
                if outcome is not Outcome.ADDED:
                    odd = outcome, pending
                    break
                self.arrived.append(
                    self.arrival(anchor_entry(pending.update, self._ledger.verdicts), pending.units)
                )
                self._gossip.on_local_update(author, pending.update.seq)
            head = self._ledger.head(author).seq
            for seq in [seq for who, seq in self._pending if who == author and seq <= head]:
                self._forget(author, seq)
        if odd and odd[0] is Outcome.WRONG_TOTAL:
            self._cut(author, f"its update {odd[1].update.seq} is broken")
        elif odd:
            now = asyncio.get_running_loop().time()
            await self._strange(odd[0], odd[1].signed, odd[1].update, odd[1].source, now)

    def arrival(self, header: Update | Retraction, units: Units = ()) -> ReceivedUpdate:
        """A change, ready for the loop."""
        return ReceivedUpdate(header, self.rules.sizes, self._ledger.blobs, self.refetch, units)

    def ruled(self) -> None:
        """A verdict is heeded from now on: what waits here and is named by it is let go of."""
        for author, seq in list(self._pending):
            if self._ledger.verdicts.is_retracted(author, seq):
                self._forget(author, seq)

    def questions(self, ask: RequestUpdates) -> list[UpdateRequest | BlobRequest]:
        """Whole updates, or what is still missing of those that were interrupted."""
        whole: list[int] = []
        found: list[UpdateRequest | BlobRequest] = []
        for seq in range(ask.first, ask.last + 1):
            missing = self.missing(ask.author, seq)
            if missing is None:
                whole.append(seq)
            found += [
                BlobRequest(digest=each, offset=self._ledger.blobs.partial_size(each))
                for each in missing or ()
            ]
        return (
            [*found, UpdateRequest(author=ask.author, first=whole[0], last=whole[-1])]
            if whole
            else found
        )

    def _cut(self, author: str, why: str) -> None:
        """Nothing more is taken of this author: every peer that sees the same bytes decides the same."""
        log.error("no more updates of %s (%s) are taken: %s", author[:8], author[-16:], why)
        self._gossip.ban_author(author)
        for seq in [seq for who, seq in self._pending if who == author]:
            self._forget(author, seq)

    def _forget(self, author: str, seq: int) -> None:
        if (pending := self._pending.pop((author, seq), None)) is None:
            return
        self._ledger.blobs.unpin(part.digest for part in pending.update.fragments)
        for blob in pending.missing:
            if needing := self._wanted.get(blob):
                needing.discard((author, seq))
                if not needing:
                    del self._wanted[blob]
                    self._ledger.blobs.discard_partial(blob)
