"""Continue from the peers' anchor when no peer has the updates that this machine lacks.

The snapshot is fetched while training goes on. The training loop continues from it when it likes
(`Exchange.resync`). A ledger that has updates never begins again at a snapshot that neither the
site nor those confirm whose work it holds: the machine waits. Everything runs on the exchange's
event loop.
"""

import asyncio
import logging

from barnraise.exchange.gossip.gossip import Gossip
from barnraise.exchange.gossip.handler_context import RunInThread
from barnraise.exchange.snapshots.snapshot_client import FetchedSnapshot, SnapshotClient
from barnraise.ledger.ledger import Ledger

log = logging.getLogger("barnraise.exchange")

RESYNC_SECONDS = 60.0  # for peers to answer; bytes that arrive extend it
RESYNC_RETRY_SECONDS = 30.0  # until the next attempt


class Resync:
    """Fetch a snapshot for a ledger that has fallen behind, and begin the ledger again there."""

    def __init__(
        self,
        ledger: Ledger,
        gossip: Gossip,
        snapshots: SnapshotClient,
        run_on_disk: RunInThread,
    ) -> None:
        """Watch `gossip` and fetch with `snapshots`."""
        self._ledger = ledger
        self._gossip = gossip
        self._snapshots = snapshots
        self._run_on_disk = run_on_disk
        self._is_fetching = False
        self._next_fetch_at = 0.0
        self._snapshot: FetchedSnapshot | None = None
        self._has_logged = False

    @property
    def is_ready(self) -> bool:
        """Whether a snapshot is on disk to continue from. Safe to read from any thread."""
        return self._snapshot is not None

    def is_due(self, now: float) -> bool:
        """Return whether `fetch` should be started."""
        return (
            not self._is_fetching
            and self._snapshot is None
            and now >= self._next_fetch_at
            and bool(self._gossip.unavailable_authors(now))
        )

    async def fetch(self) -> None:
        """Fetch a snapshot, unless most votes have no more than this machine."""
        self._is_fetching = True
        try:
            if not self._snapshots.is_overtaken(await self._snapshots.weigh_votes()):
                return
            if not self._has_logged:
                self._has_logged = True
                log.warning(
                    "nobody keeps the updates that this machine lacks: taking a snapshot in their "
                    "place, once it is confirmed"
                )
            snapshot = await self._snapshots.fetch(RESYNC_SECONDS)
            if snapshot is not None and snapshot.confirmed and self._is_compatible(snapshot):
                self._snapshot = snapshot
                self._has_logged = False
        finally:
            self._is_fetching = False
            self._next_fetch_at = asyncio.get_running_loop().time() + RESYNC_RETRY_SECONDS

    async def rebase(self) -> bool:
        """Begin the ledger again at the snapshot. Updates are paused meanwhile.

        Returns:
            False when the ledger cannot begin there after all; then nothing changed.
        """
        snapshot = self._snapshot
        self._snapshot = None
        if snapshot is None or not self._is_compatible(snapshot):
            return False
        await self._run_on_disk(
            self._ledger.rebase, snapshot.heads, snapshot.manifest.fragments, snapshot.verdicts
        )
        for ticket in snapshot.tickets:
            self._ledger.tickets.store(ticket)
        return True

    def _is_compatible(self, snapshot: FetchedSnapshot) -> bool:
        return self._ledger.can_rebase(snapshot.manifest.vector, snapshot.verdicts)
