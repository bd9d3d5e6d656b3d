"""The ledger's payload files, read again a few at a time: what a disk has changed is got anew from the others.

Runs on the exchange's event loop for ever, at a small share of the time; reading goes to a thread beside it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice

from barnraise.exchange.handlers.blob_fetcher import BlobFetcher, WantedBlob
from barnraise.exchange.ledger.ledger import Ledger
from barnraise.protocol.messages import FragmentUpdate, Update

log = logging.getLogger("barnraise.exchange")

FEW = 10  # files read in a row: to wake a thread costs more than to read a small one
EACH = 10.0  # seconds between two times, at least…
SHARE = 0.005  # …and so that reading takes no more of the time
PATIENCE = 20.0  # seconds the others have for one

Said = tuple[Update, FragmentUpdate]  # a payload, and the update that it is of


class BlobScrub:
    def __init__(self, ledger: Ledger, fetcher: BlobFetcher, disk: Callable[..., Awaitable]):
        self._ledger, self._fetcher, self._disk = ledger, fetcher, disk
        self.found = self.repaired = 0  # files that were damaged, and that are whole again
        self._lost: set[str] = set()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EACH)
            said = (
                (update, part)
                for _, update in self._ledger.updates_since({})
                for part in update.payload_parts
            )
            while few := list(islice(said, FEW)):
                await self._look(few)

    async def _look(self, few: Sequence[Said]) -> None:
        began = time.monotonic()
        read, damaged = await self._disk(self._read, few)
        took = time.monotonic() - began
        self.found += len(damaged)
        self._lost |= damaged
        for _, part in few:
            if part.digest in self._lost:
                await self._repair(part)
        if read:  # what is not here any more is passed over
            await asyncio.sleep(max(EACH, took / SHARE))

    def _read(self, few: Sequence[Said]) -> tuple[int, set[str]]:
        """How many of these are here, and which of them were damaged: those are let go of."""
        blobs, read, damaged = self._ledger.blobs, 0, set[str]()
        for update, part in few:
            name, path = part.digest, blobs.path(part.digest)
            try:
                if not blobs.has(name):
                    continue
                read += 1
                if not self._sound(name) and blobs.has(
                    name
                ):  # and not one that was pruned meanwhile
                    log.error(
                        "%s, of update %d of %s, is damaged", path, update.seq, update.peer[:8]
                    )
                    blobs.delete(name)
                    damaged.add(name)
            except OSError as error:
                log.warning("%s cannot be looked at: %s", path, error)
        return read, damaged

    def _sound(self, name: str) -> bool:
        try:
            return self._ledger.blobs.read_verified(name) is not None
        except OSError as error:  # a bad sector
            log.error("%s cannot be read: %s", self._ledger.blobs.path(name), error)
            return False

    async def _repair(self, part: FragmentUpdate) -> None:
        if await self._fetcher.fetch([WantedBlob(part.digest, part.size, part.size)], PATIENCE):
            self._lost.discard(part.digest)
            self.repaired += 1
            log.warning("%s came again, whole, from a peer", self._ledger.blobs.path(part.digest))
