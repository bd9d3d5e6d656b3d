"""The ledger's payload files, read again one by one: what a disk has changed is got anew from the others.

Runs on the exchange's event loop for ever, at a small share of the time; reading goes to a thread beside it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from barnraise.exchange.fetch import Fetcher, Wanted
from barnraise.exchange.ledger import Ledger
from barnraise.wire import FragmentUpdate, Update

log = logging.getLogger("barnraise.exchange")

EACH = 1.0  # seconds between two files, at least…
SHARE = 0.005  # …and so that reading takes no more of the time
PATIENCE = 20.0  # seconds the others have for one


class Scrub:
    def __init__(self, ledger: Ledger, fetcher: Fetcher, disk: Callable[..., Awaitable]):
        self._ledger, self._fetcher, self._disk = ledger, fetcher, disk
        self.found = self.repaired = 0  # files that were damaged, and that are whole again
        self._lost: set[str] = set()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EACH)
            for _, update in self._ledger.since({}):
                for part in update.said:
                    try:
                        await self._look(update, part)
                    except OSError as error:
                        log.warning("%s cannot be looked at: %s", self._ledger.blobs.path(part.digest), error)

    async def _look(self, update: Update, part: FragmentUpdate) -> None:
        await asyncio.sleep(0)  # what is not here any more is passed over, but not all at once
        blobs, name = self._ledger.blobs, part.digest
        if blobs.has(name):
            began = time.monotonic()
            sound = await self._disk(self._sound, name)
            took = time.monotonic() - began
            if not sound and blobs.has(name):  # and not one that was pruned meanwhile
                self.found += 1
                self._lost.add(name)
                log.error("%s, of update %d of %s, is damaged", blobs.path(name), update.seq, update.peer[:8])
                await self._disk(blobs.drop, name)
            await asyncio.sleep(max(EACH, took / SHARE))
        wanted = Wanted(name, part.size, part.size)
        if name in self._lost and await self._fetcher.fetch([wanted], PATIENCE):
            self._lost.discard(name)
            self.repaired += 1
            log.warning("%s came again, whole, from a peer", blobs.path(name))

    def _sound(self, name: str) -> bool:
        try:
            return self._ledger.blobs.sound(name) is not None
        except OSError as error:
            log.error("%s cannot be read: %s", self._ledger.blobs.path(name), error)
            return False
