"""A machine that the others have left behind: what it lacks is kept by none of those it is linked to, so it takes a
snapshot. That is fetched beside the training; the loop begins again from it when it likes (`Node.begin_again`). Runs on
the hub's loop.
"""

import asyncio
import logging

from barnraise.exchange.handlers import snapshot_client as snapshots

log = logging.getLogger("barnraise.exchange")

FETCH = 60.0  # seconds for peers to answer, and more for what comes
AGAIN = 30.0  # seconds until the next try


class Resync:
    def __init__(self, hub):
        self._hub = hub
        self._at_it, self._next = False, 0.0
        self.found: snapshots.Found | None = None  # whole, on this disk

    def due(self, now: float) -> bool:
        """Whether `fetch` is called for."""
        return (
            not self._at_it
            and self.found is None
            and now >= self._next
            and self._hub.gossip.needs_snapshot(now)
        )

    async def fetch(self) -> None:
        self._at_it = True
        try:
            log.warning(
                "nobody keeps the updates that this machine lacks: taking a snapshot in their place"
            )
            found = await snapshots.fetch(self._hub, FETCH)
            if found and self._hub.ledger.can_rebase(found.cut.vector, found.verdicts):
                self.found = found
        finally:
            self._at_it = False
            self._next = asyncio.get_running_loop().time() + AGAIN

    async def begin_again(self) -> bool:
        """The ledger begins again at what was found; updates wait until `Hub.begin`. False when it cannot after all."""
        found, self.found = self.found, None
        await self._hub.pause()
        if found is None or not self._hub.ledger.can_rebase(found.cut.vector, found.verdicts):
            return False
        await self._hub.disk(
            self._hub.ledger.rebase, found.heads, found.cut.fragments, found.verdicts
        )
        return True
