"""Delete payloads that exceed the disk budget, and publish up to where they are gone.

Parts of payloads that are still incomplete count in the budget.
"""

import shutil
from collections.abc import Mapping

from barnraise.exchange.gossip.gossip import Gossip
from barnraise.exchange.gossip.handler_context import RunInThread
from barnraise.ledger.ledger import Ledger
from barnraise.ledger.retention import payload_budget


class Pruner:
    """Prune the ledger's payloads on the exchange's event loop."""

    def __init__(
        self,
        ledger: Ledger,
        gossip: Gossip,
        run_on_disk: RunInThread,
        key: str,
        archive_rounds: int | None,
    ) -> None:
        """Set the budget by the disk's free space."""
        self._ledger = ledger
        self._gossip = gossip
        self._run_on_disk = run_on_disk
        self._key = key
        self._max_bytes = payload_budget(shutil.disk_usage(ledger.blobs.folder).free)
        self._delivered: dict[str, int] = {}  # our own authors → last update that some peer had
        self.archive_rounds = archive_rounds

    async def prune(self, safe: Mapping[str, int]) -> None:
        """Delete surplus payloads of updates up to the version vector `safe`.

        Payloads of our own updates stay until some peer has them.
        """
        for link in self._gossip.links.values():
            for author, seq in link.vector.items():
                if author.startswith(self._key):
                    self._delivered[author] = max(seq, self._delivered.get(author, 0))
        prunable = {
            author: min(seq, self._delivered.get(author, 0))
            if author.startswith(self._key)
            else seq
            for author, seq in safe.items()
        }
        pruned = await self._run_on_disk(self._prune_ledger, prunable)
        for author, seq in pruned.items():
            self._gossip.on_pruned(author, seq)

    def _prune_ledger(self, prunable: Mapping[str, int]) -> dict[str, int]:
        incomplete = self._ledger.blobs.partial_bytes()
        max_bytes = max(0, self._max_bytes - incomplete)
        return self._ledger.prune(max_bytes, prunable, self.archive_rounds)
