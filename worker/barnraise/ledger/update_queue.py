"""Changes that are in the ledger and wait for the training loop to add them to the anchor."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from barnraise.errors import StateError
from barnraise.ledger.anchor import Retraction, Withdrawal
from barnraise.ledger.blob_store import BlobStore
from barnraise.ledger.codec import decode
from barnraise.ledger.verdict_set import VerdictSet
from barnraise.protocol.messages import FragmentUpdate, Update

log = logging.getLogger("barnraise.exchange")

# int32 [size] for each fragment with a payload, else None; empty where nothing is kept in memory
Units = Sequence[torch.Tensor | None]
Samples = Sequence[torch.Tensor | None]  # float32, the compared elements of each fragment


@dataclass(frozen=True)
class ReceivedUpdate:
    """An update, or a retraction, that is in the ledger and not yet in the anchor."""

    header: Update | Retraction | Withdrawal
    sizes: tuple[int, ...]  # elements of each fragment
    blobs: BlobStore  # where the payloads are
    # Requests a payload of (digest, bytes) from the peers, blocking; returns whether it arrived.
    refetch: Callable[[str, int], bool] = lambda digest, size: False
    units: Units = ()  # what the payloads decode to, where that is in memory
    # The elements by which this machine judges what the update is worth; empty for what it does not
    # judge.
    samples: Samples = ()

    @property
    def retracts(self) -> bool:
        """Whether it changes which earlier updates are in the anchor."""
        return isinstance(self.header, Retraction) and self.header.multiplier != 0

    def decode(self, index: int) -> torch.Tensor | None:
        """Return the units to add to a fragment of the anchor.

        Returns:
            A new int32 [size] tensor, which the caller may change; None when the fragment does not
            change.

        Raises:
            StateError: When the payload is damaged on disk and no peer has it.
        """
        part, multiplier = self._part(index), self._multiplier
        if part is None:
            return None
        if multiplier > 0 and self.units:
            kept = self.units[index]
            assert kept is not None
            units = kept.clone()
        else:
            units = decode(self._read_payload(part), self.sizes[index])
        return units if multiplier > 0 else units.neg_()

    def read_encoded(self, index: int) -> tuple[bytes, int] | None:
        """Return a fragment's payload and what its units are multiplied by; None for no part.

        Raises:
            StateError: When the payload is damaged on disk and no peer has it.
        """
        part = self._part(index)
        return None if part is None else (self._read_payload(part), self._multiplier)

    def _part(self, index: int) -> FragmentUpdate | None:
        """Return a fragment's part; None when the fragment does not change."""
        update = self.header.update if isinstance(self.header, Retraction) else self.header
        part = update.fragments[index]
        return part if part.size and self._multiplier else None

    @property
    def _multiplier(self) -> int:
        match self.header:
            case Retraction():
                return self.header.multiplier
            case Withdrawal():
                return -1
            case Update():
                return 1

    @property
    def _name(self) -> str:
        if isinstance(self.header, Withdrawal):
            return "what this machine withdraws"
        update = self.header.update if isinstance(self.header, Retraction) else self.header
        return f"update {update.seq} of {update.peer[:8]}"

    def _read_payload(self, part: FragmentUpdate) -> bytes:
        payload = self.blobs.read_verified(part.digest)
        if payload is not None:
            return payload
        finding = f"{self.blobs.path(part.digest)}, a part of {self._name}, is damaged"
        log.error("%s: asking the others for it", finding)
        self.blobs.delete(part.digest)
        if self.refetch(part.digest, part.size):
            payload = self.blobs.read_verified(part.digest)
        if payload is None:
            raise StateError(f"{finding}: join again from an empty folder")
        return payload


class UpdateQueue:
    """Pass changes from the exchange's event loop to the training loop, in order.

    Attributes:
        lock: Held on the event loop while the ledger changes: one change at a time.
        is_open: Whether complete updates may enter the ledger; False while a snapshot replaces it.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        blobs: BlobStore,
        refetch: Callable[[str, int], bool],
    ) -> None:
        self._sizes = sizes
        self._blobs = blobs
        self._refetch = refetch
        # Filled by the event loop, drained by the training loop; nobody holds its lock for long.
        self._queue: list[ReceivedUpdate] = []
        self._queue_lock = threading.Lock()
        self.lock = asyncio.Lock()
        self.is_open = False

    def __len__(self) -> int:
        return len(self._queue)

    def open(self) -> None:
        """Let complete updates enter the ledger from now on."""
        self.is_open = True

    async def close(self) -> None:
        """Let no update enter the ledger; drop those in the queue, which are in the ledger."""
        async with self.lock:
            self.is_open = False
            self.drain()

    def wrap(self, header: Update | Retraction | Withdrawal) -> ReceivedUpdate:
        """Return a change in the form that the training loop receives."""
        return ReceivedUpdate(header, self._sizes, self._blobs, self._refetch)

    def append(self, header: Update | Retraction, units: Units = (), samples: Samples = ()) -> None:
        """Queue a change that is durable in the ledger."""
        received = replace(self.wrap(header), units=units, samples=samples)
        with self._queue_lock:
            self._queue.append(received)

    def drain(self) -> list[ReceivedUpdate]:
        """Remove and return all changes. Called by the training loop; never blocks."""
        with self._queue_lock:
            drained, self._queue = self._queue, []
        return drained

    @property
    def decoded_bytes(self) -> int:
        """Bytes of decoded units that the queue holds in memory."""
        with self._queue_lock:
            waiting = [*self._queue]
        return sum(count_bytes(received.units) for received in waiting)


def anchor_entry(update: Update, verdicts: VerdictSet) -> Update | Retraction:
    """Return what an anchor must record for its author's next update.

    That is the update itself or, if a verdict retracts it alone, its retraction.
    """
    tokens = verdicts.singles_of(update.author).get(update.seq)
    if tokens is None:
        return update
    return Retraction(update, 0, True, tokens=tokens)


def count_bytes(units: Units) -> int:
    """Return the bytes of decoded units."""
    return sum(fragment.nbytes for fragment in units if fragment is not None)
