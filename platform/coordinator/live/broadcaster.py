"""One voice a run: once a second it looks at the run and tells every watcher, in whichever process, what changed.

Each process has a Broadcaster for each run that somebody watches there; a lock in Valkey decides which of them speaks.
A new speaker cannot know what the one before it said last, so it skips a number: every watcher sees the gap and fetches
a snapshot. A number is never used twice, even where Valkey lost its memory: they start at the clock's milliseconds.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import redis.exceptions
from channels.db import database_sync_to_async
from channels.layers import get_channel_layer
from django.db import DatabaseError

from coordinator.lib.valkey import valkey_client
from coordinator.live.run_snapshot import (
    RunSnapshot,
    build_delta,
    lock_key,
    sequence_key,
    store_snapshot,
)
from coordinator.runs.models import Run
from coordinator.telemetry import report_queue

log = logging.getLogger(__name__)

BROADCAST_SECONDS = 1.0  # seconds
LOCK_MILLISECONDS = 5_000  # a speaker that is silent this long is replaced
KEEPALIVE_SECONDS = 5.0  # seconds: with nothing to say, it says so this often, so that watchers can tell quiet from gone
QUEUE_LENGTH = 8  # deltas that may wait for one watcher
FAN_OUT_BATCH = 25  # watchers told in one turn of the loop: a report takes several turns, each behind so many at most
FAN_OUT_PAUSE_SECONDS = 0.003  # seconds until the next turn, in which threads get on
FAN_OUT_SECONDS = 0.5  # seconds after which whoever was not told yet is told at once

_RENEW = (
    "return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('pexpire', KEYS[1], ARGV[2]) or 0"
)
_RELEASE = "return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('del', KEYS[1]) or 0"


def channel_group(run: object) -> str:
    return f"run.{run}"


class Broadcaster:
    """What one process knows of one run it may have to speak for."""

    def __init__(self, run: str):
        self.run = run
        self.token = secrets.token_hex(8)
        self.last_snapshot: RunSnapshot | None = (
            None  # as last told; None: somebody else spoke last, or nobody
        )
        self.cursor = ""
        self.last_sent = 0.0

    def next_delta(self) -> str | None:
        """The next delta as the text every watcher gets; None when there is nothing to say, or another one speaks."""
        if not self._acquire_lock():
            self.last_snapshot = None
            return None
        if self.last_snapshot is None:
            self.cursor = report_queue.cursor(self.run)
        after = RunSnapshot.capture(Run.objects.get(pk=self.run))
        points, cursor = report_queue.points_since(self.run, self.cursor)
        news = build_delta(self.last_snapshot, after, points)
        fresh = self.last_snapshot is None
        if not (
            fresh
            or set(news) - {"type", "now"}
            or time.monotonic() - self.last_sent >= KEEPALIVE_SECONDS
        ):
            return None
        news["seq"] = self._next_number(fresh)
        store_snapshot(self.run, after, news["seq"])
        self.last_snapshot, self.cursor, self.last_sent = after, cursor, time.monotonic()
        return json.dumps(news, separators=(",", ":"))

    def release_lock(self) -> None:
        valkey_client().eval(_RELEASE, 1, lock_key(self.run), self.token)

    def _acquire_lock(self) -> bool:
        valkey, key = valkey_client(), lock_key(self.run)
        if valkey.eval(_RENEW, 1, key, self.token, LOCK_MILLISECONDS):
            return True
        self.last_snapshot = None  # the lock was lost meanwhile, whoever gets it now
        return bool(valkey.set(key, self.token, nx=True, px=LOCK_MILLISECONDS))

    def _next_number(self, fresh: bool) -> int:
        with valkey_client().pipeline(transaction=True) as pipe:
            pipe.set(sequence_key(self.run), int(time.time() * 1000), nx=True)
            pipe.incrby(sequence_key(self.run), 2 if fresh else 1)
            return pipe.execute()[-1]


class Watcher:
    """One websocket. It has a queue of its own, so that nobody waits for a slow line: who falls behind by BEHIND deltas
    misses some, sees the gap in their numbers and fetches a snapshot."""

    def __init__(self, send: Callable[[dict], Awaitable[None]]):
        self._send = send
        self._waiting: asyncio.Queue[str] = asyncio.Queue(QUEUE_LENGTH)

    def queue_delta(self, text: str) -> None:
        if not self._waiting.full():
            self._waiting.put_nowait(text)

    async def send_deltas(self) -> None:
        """Until it is cancelled, or the socket is closed."""
        try:
            while True:
                await self._send({"type": "websocket.send", "text": await self._waiting.get()})
        except (OSError, RuntimeError) as error:  # as servers say that it is closed
            log.debug("a watcher left: %r", error)


@dataclass
class WatchedRun:
    """Who watches one run in this process, and the tasks that look at the run and that hear what is said of it."""

    tasks: list[asyncio.Task]
    looked: asyncio.Event
    watchers: set[Watcher] = field(default_factory=set)

    @property
    def open(self) -> bool:
        here = asyncio.get_running_loop()
        return not any(task.done() or task.get_loop() is not here for task in self.tasks)

    def close(self) -> list[asyncio.Task]:
        """What is still at it here, told to end."""
        here = asyncio.get_running_loop()
        ending = [task for task in self.tasks if not task.done() and task.get_loop() is here]
        for task in ending:
            task.cancel()
        return ending


class WatcherRegistry:
    """Who watches which run in this process; the first starts its broadcaster and the last stops it."""

    def __init__(self) -> None:
        self._rooms: dict[str, WatchedRun] = {}

    async def subscribe(self, run: str, watcher: Watcher) -> None:
        """Returns once the broadcaster has looked at the run: a snapshot fetched from here on has its number."""
        room = self._rooms.get(run)
        if room is None or not room.open:
            if room is not None:
                room.close()  # one of its tasks ended; the other would speak to nobody for ever
            listening, looked = asyncio.Event(), asyncio.Event()
            room = self._rooms[run] = WatchedRun([], looked)
            room.tasks.append(
                asyncio.create_task(
                    receive_deltas(run, room.watchers, listening), name=f"listen {run}"
                )
            )
            room.tasks.append(
                asyncio.create_task(
                    broadcast_deltas(run, listening, looked), name=f"broadcast {run}"
                )
            )
        room.watchers.add(watcher)
        await room.looked.wait()

    async def unsubscribe(self, run: str, watcher: Watcher) -> None:
        room = self._rooms.get(run)
        if room is None:
            return
        room.watchers.discard(watcher)
        if not room.watchers:
            del self._rooms[run]
            if ending := room.close():
                await asyncio.wait(ending)


watchers = WatcherRegistry()


async def receive_deltas(run: str, watchers: set[Watcher], listening: asyncio.Event) -> None:
    """One ear a process, however many watch: what is said of the run goes to all of them. Until cancelled."""
    layer = get_channel_layer()
    while True:
        try:
            channel = await layer.new_channel()
            await layer.group_add(channel_group(run), channel)
            break
        except (redis.exceptions.RedisError, OSError) as error:
            log.info("nothing can be heard of run %s yet: %s", run, error)
            listening.set()  # its watchers get their snapshot all the same, or learn that the site is ill
            await asyncio.sleep(BROADCAST_SECONDS)
    listening.set()
    try:
        while True:
            event = await layer.receive(channel)
            await fan_out(watchers, event["text"])
    finally:
        await layer.group_discard(channel_group(run), channel)


async def fan_out(watchers: set[Watcher], text: str) -> None:
    """Who comes meanwhile finds this delta in the snapshot it fetches."""
    here, ends = list(watchers), time.monotonic() + FAN_OUT_SECONDS
    for first in range(0, len(here), FAN_OUT_BATCH):
        for watcher in here[first : first + FAN_OUT_BATCH]:
            watcher.queue_delta(text)
        if time.monotonic() < ends:
            await asyncio.sleep(FAN_OUT_PAUSE_SECONDS)


async def broadcast_deltas(run: str, listening: asyncio.Event, looked: asyncio.Event) -> None:
    """Until cancelled. A database or Valkey that is gone silences it; watchers notice, and it goes on by itself."""
    await listening.wait()
    broadcaster, well = Broadcaster(run), True
    frame, release = (
        database_sync_to_async(broadcaster.next_delta),
        database_sync_to_async(broadcaster.release_lock),
    )
    layer = get_channel_layer()
    try:
        while True:
            due = time.monotonic() + BROADCAST_SECONDS
            try:
                if text := await frame():
                    await layer.group_send(channel_group(run), {"type": "live.frame", "text": text})
                well = True
            except (redis.exceptions.RedisError, DatabaseError, OSError) as error:
                broadcaster.last_snapshot = None
                if well:
                    log.warning("watchers of run %s hear nothing for now: %s", run, error)
                well = False
            except Run.DoesNotExist:
                return
            finally:
                looked.set()
            await asyncio.sleep(max(0.05, due - time.monotonic()))
    finally:
        try:
            await release()
        except (redis.exceptions.RedisError, OSError) as error:
            log.info("the broadcaster of run %s leaves its lock to run out: %s", run, error)
