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

import redis.exceptions
from channels.db import database_sync_to_async
from channels.layers import get_channel_layer
from django.db import DatabaseError

from coordinator.live.picture import Picture, delta, sequence_key
from coordinator.runs.models import Run
from coordinator.telemetry import stream

log = logging.getLogger(__name__)

EVERY = 1.0  # seconds
LOCK_MILLISECONDS = 5_000  # a speaker that is silent this long is replaced
QUIET = 5.0  # seconds: with nothing to say, it says so this often, so that watchers can tell quiet from gone

_RENEW = "return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('pexpire', KEYS[1], ARGV[2]) or 0"
_RELEASE = "return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('del', KEYS[1]) or 0"


def group(run: object) -> str:
    return f"run.{run}"


def lock_key(run: object) -> str:
    return f"live:{run}:broadcaster"


class Broadcaster:
    """What one process knows of one run it may have to speak for."""

    def __init__(self, run: str):
        self.run = run
        self.token = secrets.token_hex(8)
        self.before: Picture | None = None  # as last told; None: somebody else spoke last, or nobody
        self.cursor = ""
        self.spoke = 0.0

    def frame(self) -> str | None:
        """The next delta as the text every watcher gets; None when there is nothing to say, or another one speaks."""
        if not self._speaks():
            self.before = None
            return None
        if self.before is None:
            self.cursor = stream.cursor(self.run)
        after = Picture.take(Run.objects.get(pk=self.run))
        points, cursor = stream.points_since(self.run, self.cursor)
        news = delta(self.before, after, points)
        fresh = self.before is None
        if not (fresh or set(news) - {"type", "now"} or time.monotonic() - self.spoke >= QUIET):
            return None
        news["seq"] = self._number(fresh)
        self.before, self.cursor, self.spoke = after, cursor, time.monotonic()
        return json.dumps(news, separators=(",", ":"))

    def release(self) -> None:
        stream.client().eval(_RELEASE, 1, lock_key(self.run), self.token)

    def _speaks(self) -> bool:
        valkey, key = stream.client(), lock_key(self.run)
        if valkey.eval(_RENEW, 1, key, self.token, LOCK_MILLISECONDS):
            return True
        self.before = None  # the lock was lost meanwhile, whoever gets it now
        return bool(valkey.set(key, self.token, nx=True, px=LOCK_MILLISECONDS))

    def _number(self, fresh: bool) -> int:
        with stream.client().pipeline(transaction=True) as pipe:
            pipe.set(sequence_key(self.run), int(time.time() * 1000), nx=True)
            pipe.incrby(sequence_key(self.run), 2 if fresh else 1)
            return pipe.execute()[-1]


class Watchers:
    """Who watches which run in this process; the first starts its broadcaster and the last stops it."""

    def __init__(self) -> None:
        self._tasks: dict[str, tuple[asyncio.Task, asyncio.Event, set[str]]] = {}

    async def join(self, run: str, channel: str) -> None:
        """Returns once the broadcaster has looked at the run: a snapshot fetched from here on has its number."""
        task, looked, channels = self._tasks.get(run, (None, asyncio.Event(), set()))
        if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
            looked, channels = asyncio.Event(), set()
            task = asyncio.create_task(speak(run, looked), name=f"broadcast {run}")
            self._tasks[run] = task, looked, channels
        channels.add(channel)
        await looked.wait()

    async def leave(self, run: str, channel: str) -> None:
        task, _, channels = self._tasks.get(run, (None, None, set()))
        channels.discard(channel)
        if task is not None and not channels:
            del self._tasks[run]
            task.cancel()
            await asyncio.wait([task])


watchers = Watchers()


async def speak(run: str, looked: asyncio.Event) -> None:
    """Until cancelled. A database or Valkey that is gone silences it; watchers notice, and it goes on by itself."""
    broadcaster, well = Broadcaster(run), True
    frame, release = database_sync_to_async(broadcaster.frame), database_sync_to_async(broadcaster.release)
    layer = get_channel_layer()
    try:
        while True:
            due = time.monotonic() + EVERY
            try:
                if text := await frame():
                    await layer.group_send(group(run), {"type": "live.frame", "text": text})
                well = True
            except (redis.exceptions.RedisError, DatabaseError, OSError) as error:
                broadcaster.before = None
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
