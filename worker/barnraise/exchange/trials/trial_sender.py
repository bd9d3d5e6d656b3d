"""Offer a newcomer's rounds to peers that may attest it. Runs on the exchange's event loop."""

from collections import deque
from collections.abc import Sequence

from barnraise.exchange.gossip.handler_context import HandlerContext
from barnraise.ledger.anchor import Withdrawal
from barnraise.ledger.suspension import MIN_JUDGES
from barnraise.peering.links.connection import Connection
from barnraise.planning.round_limits import TRIAL_ROUNDS
from barnraise.protocol.enums import Standing
from barnraise.protocol.trials import TrialUpdate


class TrialSender:
    """Keep the payloads of the last trials until peers have fetched them."""

    def __init__(self, context: HandlerContext) -> None:
        self._ledger = context.ledger
        self._volunteer = context.gossip.volunteer
        self._connections = context.connections
        self._run_on_disk = context.run_on_disk
        self._offered: deque[Sequence[str]] = deque()  # digests of the last trials' payloads
        self._count = 0  # of the trials

    async def offer(self, trial: Withdrawal) -> None:
        """Offer what this machine did not publish, whose payloads are pinned."""
        update = TrialUpdate(tokens=trial.tokens, fragments=list(trial.fragments))
        for connection in self._choose_judges():
            connection.send_message(update)
        self._count += 1
        self._offered.append([part.digest for part in update.payload_parts])
        if len(self._offered) > MIN_JUDGES:
            await self._delete(self._offered.popleft())

    async def drop(self, trial: Withdrawal) -> None:
        """Delete what this machine did not publish and nobody compares, and earlier trials."""
        self._offered.append([part.digest for part in trial.fragments if part.size])
        await self.drop_offered()

    async def drop_offered(self) -> None:
        """Delete the payloads of all trials."""
        while self._offered:
            await self._delete(self._offered.popleft())

    async def _delete(self, digests: Sequence[str]) -> None:
        self._ledger.blobs.unpin(digests)
        await self._run_on_disk(self._ledger.retention.delete_files)

    def _choose_judges(self) -> list[Connection]:
        """Return whom to offer a trial: the owner's machine, and a few others in turn."""
        judges: dict[str, Connection] = {}
        for connection in self._connections.values():
            volunteer = connection.ticket.volunteer
            if volunteer != self._volunteer and self._ledger.verdicts.may_attest(volunteer):
                judges.setdefault(volunteer, connection)
        owners = [c for c in judges.values() if c.ticket.standing is Standing.OWNER]
        others = [c for c in judges.values() if c.ticket.standing is not Standing.OWNER]
        most = 2 * MIN_JUDGES
        first = self._count // TRIAL_ROUNDS * most % max(1, len(others))
        return (owners + others[first:] + others[:first])[:most]
