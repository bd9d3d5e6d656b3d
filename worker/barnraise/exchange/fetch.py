"""Blobs that are wanted by digest: text shards, the fragments of a snapshot. They come from any peer that has them, in
pieces, and go on where an interrupted fetch ended. Runs on the hub's loop."""

import asyncio
import math
from collections.abc import Awaitable, Callable

from barnraise import wire
from barnraise.errors import MessageError
from barnraise.exchange.blobs import Blobs, Growth
from barnraise.exchange.link import Link

STALL = 10.0  # seconds without progress after which a blob is asked of somebody else


class _Fetch:
    """A blob that somebody here waits for."""

    def __init__(self, size: int | None, at_most: int):
        self.size, self.at_most = size, at_most
        self.users = 0
        self.source: str | None = None
        self.came = 0  # bytes
        self.moved = 0.0  # loop time of the last progress
        self.shunned: dict[str, float] = {}  # who did not deliver, until
        self.news = asyncio.Event()

    def shun(self, now: float) -> None:
        """The one that was asked does not deliver; others first."""
        if self.source:
            self.shunned[self.source] = now + STALL
        self.source = None
        self.news.set()


class Fetcher:
    def __init__(self, links: dict[str, Link], blobs: Blobs, disk: Callable[..., Awaitable]):
        """`links` is the hub's own table, by key; `disk` runs a call beside the loop."""
        self._links, self._blobs, self._disk = links, blobs, disk
        self._fetches: dict[str, _Fetch] = {}

    async def fetch(
        self, digest: str, timeout: float, size: int | None, at_most: int, slowest: float = math.inf
    ) -> bool:
        """Gets a blob, of `size` bytes where that is known; False when nobody gave it in `timeout` seconds, and one
        more for each `slowest` bytes that came."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        fetch = self._fetches.setdefault(digest, _Fetch(size, at_most))
        fetch.users += 1
        try:
            while not self._blobs.has(digest) and (now := loop.time()) < end + fetch.came / slowest:
                self._ask(digest, fetch, now)
                fetch.news.clear()
                try:
                    async with asyncio.timeout(max(0.01, min(1.0, end + fetch.came / slowest - now))):
                        await fetch.news.wait()
                except TimeoutError:
                    if fetch.source and loop.time() > fetch.moved + STALL:
                        fetch.shun(loop.time())
            return self._blobs.has(digest)
        finally:
            fetch.users -= 1
            if not fetch.users:
                self._fetches.pop(digest, None)

    def _ask(self, digest: str, fetch: _Fetch, now: float) -> None:
        """Asks the least burdened peer that has not failed us lately, unless one is at it."""
        able = [link for key, link in self._links.items() if fetch.shunned.get(key, 0.0) < now]
        if fetch.source not in self._links and able:
            link = min(able, key=lambda one: sum(other.source == one.key for other in self._fetches.values()))
            fetch.source, fetch.moved = link.key, now
            link.post(wire.Want(digest=digest, offset=self._blobs.started(digest)))

    def wants(self, digest: str) -> bool:
        return digest in self._fetches

    async def take(self, part: wire.Part, payload: memoryview) -> None:
        """A piece of a wanted blob. Raises MessageError for one that is not."""
        fetch = self._fetches[part.digest]
        if part.total > fetch.at_most or fetch.size not in (None, part.total):
            raise MessageError(f"a blob of {part.total} bytes is not the one that was wanted")
        growth = await self._disk(self._blobs.extend, part.digest, part.offset, payload, part.total)
        now = asyncio.get_running_loop().time()
        fetch.moved, fetch.came = now, fetch.came + len(payload)
        if growth is Growth.DAMAGED:
            fetch.shun(now)
            raise MessageError(f"the bytes of {part.digest[:8]} are not what their digest says")
        if growth is Growth.WHOLE:
            fetch.news.set()

    def missing(self, source: str, digest: str, now: float) -> None:
        """That peer does not have it."""
        if (fetch := self._fetches.get(digest)) and fetch.source == source:
            fetch.shun(now)
