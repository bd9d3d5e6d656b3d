"""When payloads are let go, and what one does who lacks what nobody keeps any more. Runs on the hub's loop.

Whoever keeps payloads says up to where they are gone, so that nobody asks for those. A machine that finds what it lacks
next with nobody it is linked to fetches a snapshot beside its training; the loop takes it between two rounds.
"""

import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping

from barnraise.exchange.gossip.gossip import Gossip
from barnraise.exchange.ledger.ledger import Ledger
from barnraise.exchange.ledger.retention import payload_budget

log = logging.getLogger("barnraise.exchange")


class Pruner:
    def __init__(
        self,
        ledger: Ledger,
        gossip: Gossip,
        disk: Callable[..., Awaitable],
        key: str,
        archive: int | None,
    ):
        """`disk` runs a call beside the loop; `key` is our own. `archive`: rounds for which everything is kept, where
        that is this machine's role."""
        self._ledger, self._gossip, self._disk, self._key, self._archive = (
            ledger,
            gossip,
            disk,
            key,
            archive,
        )
        self._most = payload_budget(shutil.disk_usage(ledger.blobs.folder).free)
        self._taken: dict[str, int] = {}  # our own authors → up to where somebody else has had them

    async def prune(self, safe: Mapping[str, int]) -> None:
        """Lets go of what is too much, of updates up to `safe`. Own ones that nobody else is known to have stay."""
        for link in self._gossip.links.values():
            mine = {
                author: seq for author, seq in link.vector.items() if author.startswith(self._key)
            }
            self._taken |= {
                author: max(seq, self._taken.get(author, 0)) for author, seq in mine.items()
            }
        may = {
            author: min(seq, self._taken.get(author, 0)) if author.startswith(self._key) else seq
            for author, seq in safe.items()
        }
        gone = await self._disk(self._prune, may)
        for author, seq in gone.items():
            self._gossip.on_pruned(author, seq)

    def _prune(self, may: Mapping[str, int]) -> dict[str, int]:
        before = None if self._archive is None else self._ledger.horizon_tokens(self._archive)
        return self._ledger.prune(self._most, may, before)
