"""Cuts of the anchor between peers: our questions and their answers, and the reverse. Runs on the hub's loop."""

import asyncio
from collections.abc import Awaitable, Callable

from barnraise.exchange.handlers.snapshot_server import PATIENCE, Frozen, Question, SnapshotServer
from barnraise.exchange.network.connection import Connection
from barnraise.exchange.network.transport import ChannelClosedError
from barnraise.protocol import messages


class Cuts:
    def __init__(
        self, links: dict[str, Connection], desk: SnapshotServer, slow: Callable[..., Awaitable]
    ):
        """`links` is the hub's own table, by key; `slow` runs a call beside the loop, however long it takes."""
        self._links, self._desk, self._slow = links, desk, slow
        self._asked: dict[
            str, tuple[dict[str, int] | None, asyncio.Future[messages.SnapshotManifest]]
        ] = {}  # with the vector asked for

    async def ask(
        self, key: str, vector: dict[str, int] | None, timeout: float
    ) -> messages.SnapshotManifest | None:
        """One peer's cut at `vector` (its own choice if None); None when it does not answer in time."""
        if key not in self._links or timeout <= 0:
            return None
        answer: asyncio.Future[messages.SnapshotManifest] = (
            asyncio.get_running_loop().create_future()
        )
        self._asked[key] = vector, answer
        self._links[key].send_message(messages.SnapshotRequest(vector=vector))
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except (TimeoutError, ChannelClosedError):
            return None
        finally:
            if self._asked.get(key) == (vector, answer):
                del self._asked[key]

    def came(self, key: str, cut: messages.SnapshotManifest) -> None:
        """An answer; one to an older question is let go by."""
        vector, answer = self._asked.get(key, (None, None))
        if answer and not answer.done() and vector in (None, cut.vector):
            answer.set_result(cut)

    def left(self, key: str) -> None:
        """This peer is gone, and answers nothing any more."""
        _, answer = self._asked.get(key, (None, None))
        if answer and not answer.done():
            answer.set_exception(ChannelClosedError("it left"))

    def wanted(self, key: str, vector: dict[str, int] | None, now: float) -> None:
        """A peer asks us: at once if there is an answer already, else when the loop has copied its anchor."""
        if cut := self._desk.ask(Question(key, vector, now + PATIENCE), now):
            self._links[key].send_message(cut)

    async def answer(self, frozen: Frozen, questions: list[Question]) -> None:
        """The loop copied its anchor for these questions."""
        for question in questions:
            now = asyncio.get_running_loop().time()
            cut = await self._slow(self._desk.answer, frozen, question.vector, now)
            if cut and (link := self._links.get(question.peer)):
                link.send_message(cut)
