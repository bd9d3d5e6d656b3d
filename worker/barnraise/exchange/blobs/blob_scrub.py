"""Re-read the ledger's payload files in the background, and replace those that the disk changed.

It runs on the exchange's event loop and takes a small share of the time; files are read in a
thread.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from itertools import islice

from barnraise.exchange.blobs.blob_fetcher import BlobFetcher, WantedBlob
from barnraise.exchange.gossip.handler_context import RunInThread
from barnraise.ledger.ledger import Ledger
from barnraise.ledger.scrub_pace import ScrubPace
from barnraise.protocol.messages import FragmentUpdate, Update

log = logging.getLogger("barnraise.exchange")

BATCH_FILES = 10  # files read in a row: waking the thread costs more than reading a small file
FILE_PACE = ScrubPace(10.0)
REPAIR_SECONDS = 20.0  # for the peers to replace what is damaged here

Payload = tuple[Update, FragmentUpdate]  # a payload with the update that it belongs to


class BlobScrub:
    """Find and repair damaged payload files.

    Attributes:
        found: Files that were found damaged.
        repaired: Files that a peer replaced.
    """

    def __init__(self, ledger: Ledger, fetcher: BlobFetcher, run_in_thread: RunInThread) -> None:
        """Check the files of `ledger` and replace damaged ones with `fetcher`."""
        self._ledger = ledger
        self._fetcher = fetcher
        self._run_in_thread = run_in_thread
        self.found = 0
        self.repaired = 0
        self._damaged: set[str] = set()  # digests of files that are not repaired yet

    async def run(self) -> None:
        """Check all payload files over and over, until cancelled."""
        while True:
            await asyncio.sleep(FILE_PACE.min_pause_seconds)
            payloads = (
                (update, part)
                for _, update in self._ledger.updates_since({})
                for part in update.payload_parts
            )
            while batch := list(islice(payloads, BATCH_FILES)):
                await self._check(batch)

    async def _check(self, batch: Sequence[Payload]) -> None:
        started_at = time.monotonic()
        files_read, damaged = await self._run_in_thread(self._read, batch)
        seconds = time.monotonic() - started_at
        self.found += len(damaged)
        self._damaged |= damaged
        for _, part in batch:
            if part.digest in self._damaged:
                await self._repair(part)
        if files_read:  # pruned payloads cost no time
            await asyncio.sleep(FILE_PACE.pause_seconds(seconds))

    def _read(self, batch: Sequence[Payload]) -> tuple[int, set[str]]:
        """Read payload files and delete damaged ones, in the thread.

        Returns:
            How many files are here, and the digests of those that were damaged.
        """
        blobs = self._ledger.blobs
        files_read = 0
        damaged: set[str] = set()
        for update, part in batch:
            path = blobs.path(part.digest)
            try:
                if not blobs.has(part.digest):
                    continue
                files_read += 1
                # A file that is gone by now was pruned, not damaged.
                if not self._is_intact(part.digest) and blobs.has(part.digest):
                    log.error(
                        "%s, of update %d of %s, is damaged", path, update.seq, update.peer[:8]
                    )
                    blobs.delete(part.digest)
                    damaged.add(part.digest)
            except OSError as error:
                log.warning("%s cannot be looked at: %s", path, error)
        return files_read, damaged

    def _is_intact(self, digest: str) -> bool:
        try:
            return self._ledger.blobs.read_verified(digest) is not None
        except OSError as error:  # for example a bad sector
            log.error("%s cannot be read: %s", self._ledger.blobs.path(digest), error)
            return False

    async def _repair(self, part: FragmentUpdate) -> None:
        wanted = [WantedBlob(part.digest, part.size, part.size)]
        if await self._fetcher.fetch(wanted, REPAIR_SECONDS):
            self._damaged.discard(part.digest)
            log.warning("%s came again, whole, from a peer", self._ledger.blobs.path(part.digest))
            self.repaired += 1
