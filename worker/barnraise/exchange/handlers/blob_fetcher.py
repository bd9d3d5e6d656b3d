"""Blobs that are wanted by digest: text shards, the fragments of a snapshot. They come from every peer that has them at
once, in pieces, and go on where an interrupted fetch ended. Runs on the hub's loop.

Each blob is asked of one peer: of whoever will have sent it soonest by the goodput measured so far. A peer is asked for
some way ahead, so that its line never runs dry, and for no more than it will have sent by the time all is here. From
one that stalls, or would hold up the end, a blob goes on from another where it stopped.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

from barnraise.errors import MessageError
from barnraise.exchange.ledger.blob_store import AppendResult, BlobStore
from barnraise.exchange.network.connection import PIECE_BYTES, Connection
from barnraise.protocol import messages

STALL = 10.0  # seconds without progress after which a peer is passed over; fewer where it has been quick…
STALL_LEAST = 2.0  # …but at least so many
AHEAD = 1.0  # seconds of its line that a peer is asked for ahead
DEPTH = 2  # …and blobs at least
LOOK = 0.25  # seconds between two looks at who stalls
MEMORY = 5.0  # seconds over which goodput is forgotten


@dataclass(frozen=True)
class WantedBlob:
    """A blob of `size` bytes where that is known, and of no more than `at_most`."""

    digest: str
    size: int | None
    at_most: int


@dataclass
class Source:
    """A peer that is asked for blobs: what it still owes, in order, and how fast it sends."""

    owes: dict[str, "_Fetch"] = field(default_factory=dict)
    moved: float = 0.0  # when it last sent something new, or was first asked again
    passed_over: float = -math.inf  # until
    _bytes: float = 0.0
    _seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes/s while it owed something; 0 before anything came."""
        return self._bytes / self._seconds if self._seconds else 0.0

    @property
    def owed(self) -> int:
        return sum(fetch.left for fetch in self.owes.values())

    def sent(self, size: int, now: float) -> None:
        passed = max(now - self.moved, 1e-6)
        fade = math.exp(-passed / MEMORY)
        self._bytes, self._seconds = self._bytes * fade + size, self._seconds * fade + passed
        self.moved = now

    def stalls(self, now: float) -> bool:
        patience = min(STALL, max(STALL_LEAST, 4 * PIECE_BYTES / self.rate)) if self.rate else STALL
        return bool(self.owes) and now > self.moved + patience


class _Fetch:
    """A blob that somebody here waits for."""

    def __init__(self, wanted: WantedBlob, have: int):
        self.wanted, self.have, self.came = wanted, have, 0  # bytes here; bytes that came since
        self.users = 0
        self.holders: Container[str] | None = None  # keys of those who have it; None: anybody may
        self.source: str | None = None
        self.shunned: dict[str, float] = {}  # who does not have it, until
        self.whole = False

    @property
    def left(self) -> int:
        return max(1, (self.wanted.size or PIECE_BYTES) - self.have)


class BlobFetcher:
    def __init__(
        self, links: dict[str, Connection], blobs: BlobStore, disk: Callable[..., Awaitable]
    ):
        """`links` is the hub's own table, by key; `disk` runs a call beside the loop."""
        self._links, self._blobs, self._disk = links, blobs, disk
        self._fetches: dict[str, _Fetch] = {}
        self._sources: dict[str, Source] = {}
        self._news = asyncio.Event()

    async def fetch(
        self,
        wanted: Sequence[WantedBlob],
        timeout: float,
        slowest: float = math.inf,
        holders: Mapping[str, Container[str]] | None = None,
    ) -> bool:
        """Gets these blobs; False when they did not come in `timeout` seconds, and one more for each `slowest` bytes
        that did. `holders`: by digest, who has it; it may grow meanwhile."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        mine = [self._begun(each, holders) for each in wanted if not self._blobs.has(each.digest)]
        before = sum(fetch.came for fetch in mine)
        try:
            while not all(fetch.whole for fetch in mine):
                now = loop.time()
                if now >= (until := end + (sum(fetch.came for fetch in mine) - before) / slowest):
                    return False
                self._look(now)
                self._news.clear()
                try:
                    async with asyncio.timeout(max(0.01, min(LOOK, until - now))):
                        await self._news.wait()
                except TimeoutError:
                    continue
            return True
        finally:
            for fetch in mine:
                fetch.users -= 1
                if not fetch.users:
                    self._ended(fetch)

    def wants(self, digest: str) -> bool:
        return digest in self._fetches

    async def take(self, source: str, part: messages.BlobPart, payload: memoryview) -> None:
        """A piece of a wanted blob. Raises MessageError for one that is not."""
        fetch = self._fetches[part.digest]
        if part.total > fetch.wanted.at_most or fetch.wanted.size not in (None, part.total):
            raise MessageError(f"a blob of {part.total} bytes is not the one that was wanted")
        growth = await self._disk(
            self._blobs.append_piece, part.digest, part.offset, payload, part.total
        )
        fresh = part.offset + len(payload) - fetch.have if part.offset <= fetch.have else 0
        if fresh > 0:
            fetch.have, fetch.came = fetch.have + fresh, fetch.came + fresh
            if known := self._sources.get(source):
                known.sent(len(payload), asyncio.get_running_loop().time())
        if growth is AppendResult.CORRUPT:
            fetch.have = 0
            self.missing(source, part.digest, asyncio.get_running_loop().time())
            raise MessageError(f"the bytes of {part.digest[:8]} are not what their digest says")
        if growth is AppendResult.COMPLETE:
            fetch.whole = True
            self._ended(fetch)

    def missing(self, source: str, digest: str, now: float) -> None:
        """That peer does not have it."""
        if fetch := self._fetches.get(digest):
            fetch.shunned[source] = now + STALL
            if fetch.source == source:
                self._unasked(fetch)

    # ---- whom to ask

    def _begun(self, wanted: WantedBlob, holders: Mapping[str, Container[str]] | None) -> _Fetch:
        have = self._blobs.partial_size(wanted.digest)
        fetch = self._fetches.setdefault(wanted.digest, _Fetch(wanted, have))
        fetch.users += 1
        fetch.holders = None if holders is None else holders[wanted.digest]
        return fetch

    def _ended(self, fetch: _Fetch) -> None:
        self._unasked(fetch)
        self._fetches.pop(fetch.wanted.digest, None)

    def _unasked(self, fetch: _Fetch) -> None:
        if fetch.source and (source := self._sources.get(fetch.source)):
            source.owes.pop(fetch.wanted.digest, None)
        fetch.source = None
        self._news.set()

    def _look(self, now: float) -> None:
        """Passes over who is gone or stalls, and asks for what nobody is asked for."""
        for key, source in list(self._sources.items()):
            if key not in self._links or source.stalls(now):
                source.passed_over = now + STALL
                for fetch in list(source.owes.values()):
                    self._unasked(fetch)
            if key not in self._links:
                del self._sources[key]
        for key in self._links:
            self._sources.setdefault(key, Source())
        waiting = sorted(
            (f for f in self._fetches.values() if f.source is None), key=lambda f: -f.left
        )
        able = {key: source for key, source in self._sources.items() if source.passed_over < now}
        speed = sum(source.rate for source in able.values()) or 1.0
        rest = (
            sum(fetch.left for fetch in self._fetches.values()) / speed
        )  # seconds until all is here, at best
        while asked := self._next(waiting, able, rest, now):
            fetch, key = asked
            waiting.remove(fetch)
            self._ask(fetch, key, now)
        if not waiting:
            self._relieve(able, now)

    def _next(
        self, waiting: list[_Fetch], able: dict[str, Source], rest: float, now: float
    ) -> tuple | None:
        """(fetch, peer) to ask next: the largest that some peer with room has, of whoever will have sent it soonest."""
        roomy = [(key, source) for key, source in able.items() if _room(source)]
        for fetch in waiting:
            having = [(key, source) for key, source in roomy if _has(key, fetch, now)]
            if not having:
                continue
            key, source = min(having, key=lambda one: _finish(one[1], fetch, able))
            if _finish(source, fetch, able) <= rest + LOOK or not any(
                _has(other, fetch, now)
                and _finish(each, fetch, able) < _finish(source, fetch, able)
                for other, each in able.items()
            ):
                return fetch, key
        return None

    def _ask(self, fetch: _Fetch, key: str, now: float) -> None:
        source = self._sources[key]
        if not source.owes:
            source.moved = now
        fetch.source = key
        source.owes[fetch.wanted.digest] = fetch
        fetch.have = self._blobs.partial_size(fetch.wanted.digest)
        self._links[key].send_message(
            messages.BlobRequest(digest=fetch.wanted.digest, offset=fetch.have)
        )

    def _relieve(self, able: dict[str, Source], now: float) -> None:
        """At the end, who has nothing left to send takes over what will come last from where it is."""
        for key, idle in able.items():
            if idle.owes or not idle.rate:
                continue
            late = [
                (f, s)
                for s in able.values()
                for f in s.owes.values()
                if _has(key, f, now) and s.rate
            ]
            fetch, source = max(
                late, key=lambda one: one[1].owed / one[1].rate, default=(None, None)
            )
            if fetch and fetch.left / idle.rate + LOOK < 0.5 * source.owed / source.rate:
                last = list(source.owes.values())[-1]  # what it has not begun, if there is any
                last = last if _has(key, last, now) else fetch
                self._unasked(last)
                self._ask(last, key, now)


def _has(key: str, fetch: _Fetch, now: float) -> bool:
    return fetch.shunned.get(key, 0.0) < now and (fetch.holders is None or key in fetch.holders)


def _room(source: Source) -> bool:
    return len(source.owes) < DEPTH or source.owed < source.rate * AHEAD


def _finish(source: Source, fetch: _Fetch, able: Mapping[str, Source]) -> float:
    """Seconds until this peer would have sent that blob, too. Who has sent nothing yet is taken to be as the others."""
    known = [each.rate for each in able.values() if each.rate]
    rate = source.rate or (sum(known) / len(known) if known else 1.0)
    return (source.owed + fetch.left) / rate
