"""The updates whose headers are here and that are not in the ledger yet, and what they occupy.

Each one reserves bytes of the disk, pins its payloads there, and may have some of them in memory.
How many may wait is bounded. The table belongs to the event loop.
"""

import asyncio
import contextlib
import logging
import math
import shutil
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from barnraise.errors import MessageError
from barnraise.exchange.blobs.piece_sources import PieceSources
from barnraise.exchange.gossip.handler_context import HandlerContext
from barnraise.exchange.gossip.requests import ArrivedBytes
from barnraise.ledger.author_pace import PacedUpdate
from barnraise.ledger.ledger import Ledger, Outcome
from barnraise.ledger.retention import payload_budget
from barnraise.ledger.update_queue import Samples, Units
from barnraise.peering.limits.repeated_warnings import RepeatedWarnings
from barnraise.protocol.messages import BlobPart, Signed, Ticket, Update, UpdatePush

log = logging.getLogger("barnraise.exchange")

MAX_INCOMPLETE = 512  # headers that wait for payloads or for their author's earlier updates
MAX_INCOMPLETE_OF_VOLUNTEER = 256  # such headers of one person's machines
INCOMPLETE_SHARE = 0.5  # of the disk budget that the payloads of such updates may take
VOLUNTEER_SHARE = 0.25  # of the bytes in all that one volunteer may reserve
STALE_SECONDS = 60.0  # without a byte after which an update makes room for others
EXPIRY_SECONDS = 600.0  # without a byte after which an incomplete update is dropped
MIN_BYTES_PER_SECOND = 2048.0  # an update that arrives more slowly than this is dropped in the end
DELETION_DELAY = 0.5  # seconds from the first dropped update until unneeded payloads are deleted

AuthorSeq = tuple[str, int]  # what identifies an update: its author and sequence number


@dataclass(frozen=True)
class PayloadPiece:
    """A piece of a payload, and the peer that sent it."""

    part: BlobPart
    payload: memoryview
    source: str


@dataclass
class IncompleteUpdate:
    """An update whose header is here and that is not in the ledger yet."""

    push: UpdatePush  # the signed header and the signed ticket that it names
    update: Update
    ticket: Ticket
    source: str  # the peer that sent the header
    # Payload digest → bytes, of payloads that have not arrived.
    missing: dict[str, int] = field(default_factory=dict)
    # Payload digest → bytes of it that are here, of those that are missing.
    arrived: dict[str, int] = field(default_factory=dict)
    # Payload digest → payloads of those that are missing on disk and here in memory.
    buffered: dict[str, PayloadPiece] = field(default_factory=dict)
    is_expected: bool = False  # whether it is recorded on disk that these payloads are on their way
    is_verified: bool = False  # whether all payloads are here and match the header
    # Whether its key had published more than it can have trained when it was appended.
    is_ahead: bool = False
    units: Units = ()  # what they decode to, where that is kept in memory
    samples: Samples = ()  # the elements by which the update is judged

    @property
    def signed(self) -> Signed:
        """The signed header."""
        return self.push.header

    @property
    def identity(self) -> AuthorSeq:
        """Its author and sequence number."""
        return self.update.author, self.update.seq

    @property
    def is_buffered(self) -> bool:
        """Whether all payloads that are missing on disk are in memory."""
        return self.missing.keys() <= self.buffered.keys()

    @property
    def paced(self) -> PacedUpdate:
        """What its author's pace depends on."""
        update = self.update
        return PacedUpdate(
            key=update.peer,
            begins=update.seq == 1,
            size=sum(part.size for part in update.fragments),
            time=update.time_ms / 1000,
            tokens_per_second=self.ticket.max_tokens_per_second,
        )

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


def append_updates(ledger: Ledger, batch: Sequence[IncompleteUpdate]) -> list[Outcome]:
    """Append an author's next updates with the tickets that they name, in the disk thread.

    Only these tickets are stored, for ever: a machine may have a new one as often as it asks.
    """
    updates = [(ready.signed, ready.update) for ready in batch]
    return ledger.append_all(updates, [ready.push.ticket for ready in batch])


@dataclass
class Reservation:
    """What an incomplete update reserves."""

    volunteer: str  # digest of its author's volunteer
    size: int  # bytes of its payloads
    reserved_at: float  # when its header arrived, in seconds
    progress_at: float  # when its last byte arrived

    def is_expired(self, now: float) -> bool:
        """Return whether its bytes have not arrived in time."""
        longest = EXPIRY_SECONDS + self.size / MIN_BYTES_PER_SECOND
        return now > self.progress_at + EXPIRY_SECONDS or now > self.reserved_at + longest


@dataclass(frozen=True)
class ReservedTotal:
    """The bytes and the number of some reservations."""

    size: int = 0
    count: int = 0

    def plus(self, size: int) -> "ReservedTotal":
        """Return the total with one more reservation."""
        return ReservedTotal(self.size + size, self.count + 1)

    def exceeds(self, limit: "ReservedTotal") -> bool:
        """Return whether it is above a limit; a single reservation never is."""
        return self.count > 1 and (self.size > limit.size or self.count > limit.count)


class TransferBudget:
    """The reservations of all incomplete updates, in order of arrival. Pure.

    A header costs its author nothing, and reserves the bytes of all its payloads on every peer's
    disk until they are complete. The reservations have a bound in all and for each volunteer. When
    all is taken, the volunteer with the largest one makes room for another with a smaller one.
    """

    def __init__(self, limit: ReservedTotal, volunteer_count: int) -> None:
        """Limit all reservations, and how many updates of one volunteer may have some."""
        self._limit = limit
        self._volunteer_limit = ReservedTotal(int(VOLUNTEER_SHARE * limit.size), volunteer_count)
        self._reservations: dict[AuthorSeq, Reservation] = {}

    def __len__(self) -> int:
        return len(self._reservations)

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes of all reservations."""
        return sum(reservation.size for reservation in self._reservations.values())

    def reserve(
        self, name: AuthorSeq, volunteer: str, size: int, now: float
    ) -> list[AuthorSeq] | None:
        """Reserve `size` bytes for an update of a volunteer.

        Returns:
            The updates to drop for it, whose reservations have ended; None when there is no room.
        """
        remaining = dict(self._reservations)
        dropped: list[AuthorSeq] = []
        while True:
            totals = _sum_by_volunteer(remaining)
            mine = totals.get(volunteer, ReservedTotal()).plus(size)
            everything = ReservedTotal(
                sum(total.size for total in totals.values()) + size, len(remaining) + 1
            )
            if mine.exceeds(self._volunteer_limit):
                victim = _find_stalest(remaining, now, volunteer, STALE_SECONDS)
            elif everything.exceeds(self._limit):
                most = max(totals, key=lambda other: (totals[other].size, totals[other].count))
                has_more = totals[most].size > mine.size or (
                    totals[most].size == mine.size and totals[most].count > mine.count
                )
                if has_more:
                    victim = _find_stalest(remaining, now, most, -math.inf)
                else:
                    victim = _find_stalest(remaining, now, None, STALE_SECONDS)
            else:
                break
            if victim is None:
                return None
            del remaining[victim]
            dropped.append(victim)
        remaining[name] = Reservation(volunteer, size, now, now)
        self._reservations = remaining
        return dropped

    def record_progress(self, name: AuthorSeq, now: float) -> None:
        """Record that bytes of an update arrived."""
        if reservation := self._reservations.get(name):
            reservation.progress_at = now

    def release(self, name: AuthorSeq) -> None:
        """End the reservation of an update that is complete or dropped."""
        self._reservations.pop(name, None)

    def expired(self, now: float) -> list[AuthorSeq]:
        """Return the updates whose bytes have not arrived in time."""
        return [
            name for name, reservation in self._reservations.items() if reservation.is_expired(now)
        ]


def _sum_by_volunteer(reservations: Mapping[AuthorSeq, Reservation]) -> dict[str, ReservedTotal]:
    """Return what each volunteer has reserved."""
    totals: dict[str, ReservedTotal] = {}
    for reservation in reservations.values():
        before = totals.get(reservation.volunteer, ReservedTotal())
        totals[reservation.volunteer] = before.plus(reservation.size)
    return totals


def _find_stalest(
    reservations: Mapping[AuthorSeq, Reservation],
    now: float,
    volunteer: str | None,
    longest: float,
) -> AuthorSeq | None:
    """Return the update, of a volunteer or of all, that has had no byte for the longest time.

    None if no update has had none for more than `longest` seconds.
    """
    idle = [
        (now - reservation.progress_at, index, name)
        for index, (name, reservation) in enumerate(reservations.items())
        if volunteer in (None, reservation.volunteer) and now - reservation.progress_at > longest
    ]
    return max(idle, key=lambda entry: (entry[0], -entry[1]))[2] if idle else None


class IncompleteTable:
    """All incomplete updates by author and sequence number, and the payloads that they wait for.

    Attributes:
        transfers: What they reserve of the disk.
        pieces: The peers that sent the pieces of these payloads.
        buffered_bytes: The bytes of payloads that are in memory.
    """

    def __init__(self, context: HandlerContext) -> None:
        self._ledger = context.ledger
        self._gossip = context.gossip
        self._spawn = context.spawn
        self._run_on_disk = context.run_on_disk
        self._updates: dict[AuthorSeq, IncompleteUpdate] = {}
        self._waiting_for: dict[str, set[AuthorSeq]] = {}  # payload → updates that lack it
        disk_budget = payload_budget(shutil.disk_usage(context.ledger.blobs.folder).free)
        self.transfers = TransferBudget(
            ReservedTotal(int(INCOMPLETE_SHARE * disk_budget), MAX_INCOMPLETE),
            MAX_INCOMPLETE_OF_VOLUNTEER,
        )
        self._repeats = RepeatedWarnings()
        self._will_delete = False  # whether a look for unneeded payloads is on its way
        self.pieces = PieceSources()
        self.buffered_bytes = 0

    def all(self) -> list[IncompleteUpdate]:
        """Return all updates. Safe to call from another thread."""
        return list(self._updates.values())

    def get(self, author: str, seq: int) -> IncompleteUpdate | None:
        """Return an update if it is incomplete."""
        return self._updates.get((author, seq))

    def contains(self, incomplete: IncompleteUpdate) -> bool:
        """Return whether this update is here and was not dropped meanwhile."""
        return self._updates.get(incomplete.identity) is incomplete

    def seqs(self, author: str) -> list[int]:
        """Return the sequence numbers of an author's updates."""
        return [seq for other, seq in self._updates if other == author]

    def waiting_for(self, digest: str) -> list[IncompleteUpdate]:
        """Return the updates that lack this payload."""
        return [self._updates[identity] for identity in self._waiting_for.get(digest, ())]

    def make_room(self, update: Update, ticket: Ticket, now: float) -> bool:
        """Return whether another update of this volunteer may wait; drop others if need be.

        Headers that cost their author nothing must not exclude those of everybody else.
        """
        size = sum(part.size for part in update.fragments)
        name = (update.author, update.seq)
        dropped = self.transfers.reserve(name, ticket.volunteer, size, now)
        for author, seq in dropped or ():
            self.postpone(author, seq, now)
        return dropped is not None

    def add(self, incomplete: IncompleteUpdate) -> None:
        """Let an update wait for those of its payloads that are not here: they are `missing`."""
        update = incomplete.update
        blobs = self._ledger.blobs
        blobs.pin(part.digest for part in update.fragments)
        is_retracted = self._ledger.verdicts.is_retracted(*incomplete.identity)
        parts = [] if is_retracted else update.fragments
        incomplete.missing = {
            part.digest: part.size for part in parts if not blobs.has(part.digest)
        }
        incomplete.arrived = {digest: blobs.partial_size(digest) for digest in incomplete.missing}
        self._updates[incomplete.identity] = incomplete
        for digest in incomplete.missing:
            self._waiting_for.setdefault(digest, set()).add(incomplete.identity)

    def buffer(self, incomplete: IncompleteUpdate, piece: PayloadPiece) -> None:
        """Keep a payload of an update in memory."""
        incomplete.buffered[piece.part.digest] = piece
        self.buffered_bytes += len(piece.payload)

    def release_buffered(self, incomplete: IncompleteUpdate, digests: Iterable[str]) -> None:
        """Keep these payloads of an update in memory no longer."""
        for digest in digests:
            piece = incomplete.buffered.pop(digest, None)
            if piece is not None:
                self.buffered_bytes -= len(piece.payload)

    def pop_waiting(self, digest: str) -> set[AuthorSeq]:
        """Let no update wait for a payload, which is on the disk; return those that did."""
        self.pieces.forget(digest)
        return self._waiting_for.pop(digest, set())

    def stop_waiting(self, incomplete: IncompleteUpdate) -> list[str]:
        """Let an update wait for no payload; return those for which no other update waits."""
        unwanted: list[str] = []
        for digest in incomplete.missing:
            waiting = self._waiting_for.get(digest)
            if waiting is None:
                continue
            waiting.discard(incomplete.identity)
            if not waiting:
                del self._waiting_for[digest]
                self.pieces.forget(digest)
                unwanted.append(digest)
        return unwanted

    # ---- what is dropped

    def expired(self, now: float) -> list[AuthorSeq]:
        """Return the updates whose bytes do not arrive.

        One that is complete and waits for its time, its author's pace or earlier updates stays,
        within the same budget: its bytes would be downloaded again.
        """
        expired = []
        for identity in self.transfers.expired(now):
            incomplete = self._updates.get(identity)
            if incomplete is None or not incomplete.is_verified:
                expired.append(identity)
        return expired

    def postpone(self, author: str, seq: int, now: float) -> None:
        """Drop an update to make room; it is requested again later."""
        incomplete = self.get(author, seq)
        if incomplete is not None:
            peer = incomplete.update.peer
            self._repeats.warn(f"dropped {peer}", "dropped update %d of %s for now", seq, peer[:8])
            self._gossip.requests.on_failed(incomplete.source, author, seq, now)
        self.drop(author, seq)

    @contextlib.asynccontextmanager
    async def dropping_on_error(self, updates: Collection[IncompleteUpdate]) -> AsyncIterator[None]:
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
                if self.contains(incomplete):
                    self.postpone(*incomplete.identity, now)
            raise

    def drop(self, author: str, seq: int) -> None:
        """Wait for this update no longer."""
        self.transfers.release((author, seq))
        incomplete = self._updates.pop((author, seq), None)
        if incomplete is None:
            return
        self._ledger.blobs.unpin(part.digest for part in incomplete.update.fragments)
        self.release_buffered(incomplete, list(incomplete.buffered))
        for digest in self.stop_waiting(incomplete):
            self._ledger.blobs.discard_partial(digest)
        if seq > self._ledger.head(author).seq and not self._will_delete:
            self._will_delete = True
            self._spawn(self._delete_unneeded())

    async def _delete_unneeded(self) -> None:
        """Delete payloads that are complete and belong to no update.

        It looks at all that are on their way, so that many dropped updates are one look.
        """
        await asyncio.sleep(DELETION_DELAY)
        self._will_delete = False
        await self._run_on_disk(self._ledger.retention.delete_files)
