"""Simulate browsers that follow a site's mirrors.

Each opens a websocket at one mirror, fetches a snapshot once it is open, and receives numbered
deltas. If the connection breaks or stays silent, it moves to the next mirror of the list.
"""

import asyncio
import json
import random
import threading
from collections.abc import Sequence

import httpx
from available_clock import AvailableClock
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException
from websockets.typing import Origin

SILENCE_SECONDS = 12.0  # after which a watcher moves: a site sends something every five
RETRY_SECONDS = 1.0  # between two attempts, varied by half


class Watcher:
    """Follow a run at one mirror after another.

    Attributes:
        last_received: Seconds on the drill's clock.
        moves: Number of moves to another mirror.
        snapshots: Number of snapshots fetched.
        gaps: Number of gaps between deltas.
        deltas: Number of deltas received.
        longest_silence: In seconds.
    """

    def __init__(
        self, number: int, run: str, mirrors: Sequence[str], clock: AvailableClock
    ) -> None:
        self.run = run
        self.clock = clock
        self.mirrors = list(mirrors)
        self.last_received = -1e9
        self.moves = 0
        self.snapshots = 0
        self.gaps = 0
        self.deltas = 0
        self.longest_silence = 0.0
        self._position = number % len(mirrors)
        self._seq = 0

    @property
    def url(self) -> str:
        """Return the address of the current mirror."""
        return self.mirrors[self._position]

    @property
    def is_connected(self) -> bool:
        """Return whether something arrived within `SILENCE_SECONDS`."""
        return self.clock.now() - self.last_received < SILENCE_SECONDS

    @property
    def patience(self) -> float:
        """Return the silence in seconds after which it moves, at this machine's present load."""
        return SILENCE_SECONDS / self.clock.share

    async def watch(self, http: httpx.AsyncClient) -> None:
        """Follow the run until the task is cancelled."""
        while True:
            try:
                await self._follow_mirror(http)
            except (OSError, TimeoutError, WebSocketException, httpx.HTTPError, ValueError):
                self._position = (self._position + 1) % len(self.mirrors)
                self.moves += 1
                await asyncio.sleep(RETRY_SECONDS * random.uniform(0.5, 1.5))

    async def _follow_mirror(self, http: httpx.AsyncClient) -> None:
        url = f"ws{self.url.removeprefix('http')}/ws/runs/{self.run}/"
        async with connect(
            url, origin=Origin(self.url), open_timeout=self.patience, close_timeout=1, proxy=None
        ) as socket:
            await self._fetch_snapshot(http)
            while True:
                delta = json.loads(await asyncio.wait_for(socket.recv(), self.patience))
                self._record_arrival()
                self.deltas += 1
                if delta["seq"] <= self._seq:
                    continue
                if delta["seq"] > self._seq + 1:  # another process sends now, or a delta was lost
                    self.gaps += 1
                    await self._fetch_snapshot(http)
                else:
                    self._seq = delta["seq"]

    async def _fetch_snapshot(self, http: httpx.AsyncClient) -> None:
        answer = await http.get(f"{self.url}/live/{self.run}/", timeout=self.patience)
        if answer.status_code != 200:
            raise ValueError(f"{self.url} answered {answer.status_code}")
        self._seq = answer.json()["seq"]
        self.snapshots += 1
        self._record_arrival()

    def _record_arrival(self) -> None:
        now = self.clock.now()
        if self.last_received > 0:
            self.longest_silence = max(self.longest_silence, now - self.last_received)
        self.last_received = now


class WatcherGroup(threading.Thread):
    """Run all watchers in one thread."""

    def __init__(self, count: int, run: str, mirrors: Sequence[str], clock: AvailableClock) -> None:
        super().__init__(name="watchers", daemon=True)
        self.watchers = [Watcher(number, run, mirrors, clock) for number in range(count)]
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()

    def run(self) -> None:
        """Watch until `stop`."""
        self._loop.run_until_complete(self._watch())

    async def _watch(self) -> None:
        async with httpx.AsyncClient() as http:
            tasks = [asyncio.create_task(watcher.watch(http)) for watcher in self.watchers]
            await self._stopped.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self.join(10)

    @property
    def connected(self) -> int:
        """Return the number of connected watchers."""
        return sum(watcher.is_connected for watcher in self.watchers)

    @property
    def connected_by_mirror(self) -> dict[str, int]:
        """Return the number of connected watchers by the mirror's address."""
        counts: dict[str, int] = {}
        for watcher in self.watchers:
            counts[watcher.url] = counts.get(watcher.url, 0) + watcher.is_connected
        return counts
