"""Browsers that follow a site's mirrors: a websocket at one, a snapshot once it is open, then numbered deltas; when it
dies, or says nothing for long, the next mirror of the list."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Sequence

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

SILENT = 12.0  # seconds: a site says something every five
PAUSE = 1.0  # between two tries, and a little


class Watcher:
    def __init__(self, number: int, run: str, mirrors: Sequence[str]):
        self.run, self.mirrors, self.at = run, list(mirrors), number % len(mirrors)
        self.heard = -1e9  # monotonic seconds
        self.moves = self.snapshots = self.gaps = self.deltas = 0
        self.longest = 0.0  # seconds without a word
        self.seq = 0

    @property
    def url(self) -> str:
        return self.mirrors[self.at]

    async def watch(self, http: httpx.AsyncClient) -> None:
        while True:
            try:
                await self._stay(http)
            except (OSError, TimeoutError, WebSocketException, httpx.HTTPError, ValueError):
                self.at, self.moves = (self.at + 1) % len(self.mirrors), self.moves + 1
                await asyncio.sleep(PAUSE * random.uniform(0.5, 1.5))

    async def _stay(self, http: httpx.AsyncClient) -> None:
        where = f"ws{self.url.removeprefix('http')}/ws/runs/{self.run}/"
        async with connect(
            where, origin=self.url, open_timeout=6, close_timeout=1, proxy=None
        ) as socket:
            await self._look(http)
            while True:
                told = json.loads(await asyncio.wait_for(socket.recv(), SILENT))
                self._heard()
                self.deltas += 1
                if told["seq"] <= self.seq:
                    continue
                if (
                    told["seq"] > self.seq + 1
                ):  # another speaks for the run now, or we were too slow
                    self.gaps += 1
                    await self._look(http)
                else:
                    self.seq = told["seq"]

    async def _look(self, http: httpx.AsyncClient) -> None:
        answer = await http.get(f"{self.url}/live/{self.run}/")
        if answer.status_code != 200:
            raise ValueError(f"{self.url} answered {answer.status_code}")
        self.seq, self.snapshots = answer.json()["seq"], self.snapshots + 1
        self._heard()

    def _heard(self) -> None:
        now = time.monotonic()
        if self.heard > 0:
            self.longest = max(self.longest, now - self.heard)
        self.heard = now


class Watchers(threading.Thread):
    """All of them, in one thread. `connected`: who heard something within SILENT seconds."""

    def __init__(self, count: int, run: str, mirrors: Sequence[str]):
        super().__init__(name="watchers", daemon=True)
        self.all = [Watcher(number, run, mirrors) for number in range(count)]
        self._loop = asyncio.new_event_loop()

    def run(self) -> None:
        self._loop.run_until_complete(self._watch())

    async def _watch(self) -> None:
        self._leave = asyncio.Event()
        async with httpx.AsyncClient(timeout=6) as http:
            tasks = [asyncio.create_task(each.watch(http)) for each in self.all]
            await self._leave.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._leave.set)
        self.join(10)

    @property
    def connected(self) -> int:
        return sum(time.monotonic() - each.heard < SILENT for each in self.all)

    @property
    def places(self) -> dict[str, int]:
        """Mirror → how many watch there now."""
        found: dict[str, int] = {}
        for each in self.all:
            found[each.url] = found.get(each.url, 0) + (time.monotonic() - each.heard < SILENT)
        return found
