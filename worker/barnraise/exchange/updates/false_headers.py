"""Headers whose payloads contradict them: no peer's ledger can contain such an update.

An author that sends one machine another header than the rest, with payloads that do not match it,
would cut that machine off from its later updates, which all others have. So the false header is
remembered: with the one that others have in its place it proves a fork.
"""

from barnraise.errors import MessageError
from barnraise.exchange.gossip.gossip import Gossip
from barnraise.exchange.updates.incomplete_updates import IncompleteUpdate
from barnraise.exchange.verdicts.verdict_handler import VerdictHandler
from barnraise.protocol.fork_proof import Fork
from barnraise.protocol.messages import Signed, Update

MAX_FALSE_HEADERS = 256  # that are remembered, the first of each author


class FalseHeaders:
    """The first false header of each author, and the search for the true one."""

    def __init__(self, gossip: Gossip, verdicts: VerdictHandler) -> None:
        self._gossip = gossip
        self._verdicts = verdicts
        self._headers: dict[str, IncompleteUpdate] = {}  # by author, oldest first

    def record(self, false: IncompleteUpdate) -> None:
        """Remember a header that its payloads contradict, and request the one that others have."""
        update = false.update
        before = self._headers.get(update.author)
        if before is not None and before.update.seq <= update.seq:
            return
        self._headers[update.author] = false
        if len(self._headers) > MAX_FALSE_HEADERS:
            self._forget(next(iter(self._headers)))
        self.request_rivals()

    def request_rivals(self) -> None:
        """Request the headers that others have in the place of false ones."""
        for author, false in self._headers.items():
            seq = false.update.seq
            for key in self._gossip.holders(author, seq):
                self._verdicts.request_headers(key, author, seq, seq)

    async def prove_fork(self, signed: Signed, update: Update) -> bool:
        """Return whether a header and a false one of its author are a fork, which is applied.

        Raises:
            MessageError: When it is the false header: no honest peer passes it on.
        """
        false = self._headers.get(update.author)
        if false is None or false.update.seq != update.seq:
            return False
        if false.push.header.body == signed.body:
            raise MessageError(
                f"update {update.seq} of {update.peer[:8]} is not what its header says"
            )
        self._forget(update.author)
        known = false.push
        await self._verdicts.on_proof(Fork(one=known.header, other=signed, ticket=known.ticket))
        return True

    def _forget(self, author: str) -> None:
        """Forget an author's false header, and request its updates again."""
        del self._headers[author]
        self._gossip.permit_author(author)
