"""Broadcast a run's changes to all its watchers, in all processes: once a second if it can be.

Each process has a `Broadcaster` for each run that somebody watches there. A lock in Valkey decides
which process broadcasts. The process that takes over the lock cannot know what the previous one
sent last, so it skips a number: every watcher sees the gap and fetches a snapshot. A number is
never used twice, even after Valkey lost its data: numbers start at the clock's milliseconds.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

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

BROADCAST_SECONDS = 1.0  # between two deltas
LOCK_MILLISECONDS = 5_000  # after which another process takes over from a silent broadcaster
KEEPALIVE_SECONDS = 2.0  # an empty delta is sent this often, so that watchers notice an outage
QUEUE_LENGTH = 8  # deltas that may wait for one watcher
# A delta goes to the watchers in batches, so that the event loop also serves other requests.
FAN_OUT_BATCH = 25  # watchers
FAN_OUT_PAUSE_SECONDS = 0.003  # between two batches; lets threads run
FAN_OUT_SECONDS = 0.5  # after which the remaining watchers are served without pauses

_RENEW = (
    "return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('pexpire', KEYS[1], ARGV[2]) or 0"
)
_RELEASE = "return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('del', KEYS[1]) or 0"


def channel_group(run: object) -> str:
    """Name the channel layer's group for a run's deltas."""
    return f"run.{run}"


class Broadcaster:
    """Compute the deltas of one run while this process holds the run's lock."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.token = secrets.token_hex(8)
        # The snapshot after the last delta. None: another process, or none, sent the last delta.
        self.last_snapshot: RunSnapshot | None = None
        self.cursor = ""
        self.last_sent = 0.0

    def next_delta(self) -> str | None:
        """Return the next delta as JSON; None if nothing changed or another process sends."""
        if not self._acquire_lock():
            self.last_snapshot = None
            return None
        is_first = self.last_snapshot is None
        if is_first:
            self.cursor = report_queue.points_cursor(self.run)
        snapshot = RunSnapshot.capture(Run.objects.get(pk=self.run))
        points, cursor = report_queue.points_since(self.run, self.cursor)
        delta = build_delta(self.last_snapshot, snapshot, points)
        has_changes = bool(set(delta) - {"type", "now"})
        is_keepalive_due = time.monotonic() - self.last_sent >= KEEPALIVE_SECONDS
        if not (is_first or has_changes or is_keepalive_due):
            return None
        delta["seq"] = self._next_number(leave_gap=is_first)
        # Before the delta is sent: a watcher that arrives later finds it in the stored snapshot.
        store_snapshot(self.run, snapshot, delta["seq"])
        self.last_snapshot = snapshot
        self.cursor = cursor
        self.last_sent = time.monotonic()
        return json.dumps(delta, separators=(",", ":"))

    def release_lock(self) -> None:
        """Release the lock if this process holds it."""
        valkey_client().eval(_RELEASE, 1, lock_key(self.run), self.token)

    def _acquire_lock(self) -> bool:
        """Renew the lock or acquire a free one; return whether this process holds it now."""
        valkey = valkey_client()
        key = lock_key(self.run)
        if valkey.eval(_RENEW, 1, key, self.token, LOCK_MILLISECONDS):
            return True
        self.last_snapshot = None  # the lock was lost in between, even if it is acquired again now
        return bool(valkey.set(key, self.token, nx=True, px=LOCK_MILLISECONDS))

    def _next_number(self, leave_gap: bool) -> int:
        with valkey_client().pipeline(transaction=True) as pipe:
            pipe.set(sequence_key(self.run), int(time.time() * 1000), nx=True)
            pipe.incrby(sequence_key(self.run), 2 if leave_gap else 1)
            return pipe.execute()[-1]


class Watcher:
    """Send deltas to one websocket.

    Each watcher has its own queue, so that nobody waits for a slow connection. A watcher that is
    more than QUEUE_LENGTH deltas behind misses some, sees the gap in their numbers and fetches a
    snapshot.
    """

    def __init__(self, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        self._send = send
        self._queue: asyncio.Queue[str] = asyncio.Queue(QUEUE_LENGTH)

    @property
    def pending(self) -> int:
        """Count the deltas that wait to be sent."""
        return self._queue.qsize()

    def queue_delta(self, text: str) -> None:
        """Queue a delta, or drop it if the queue is full."""
        if not self._queue.full():
            self._queue.put_nowait(text)

    async def send_deltas(self) -> None:
        """Send queued deltas until cancelled or until the socket is closed."""
        try:
            while True:
                await self._send({"type": "websocket.send", "text": await self._queue.get()})
        except (OSError, RuntimeError) as error:  # servers report a closed socket by either
            log.debug("a watcher left: %r", error)


@dataclass
class WatchedRun:
    """The watchers of one run in this process, and the two tasks that serve them.

    Attributes:
        broadcasted: Set once the broadcaster has looked at the run.
        looked_at: When it last did so with success, in seconds of the monotonic clock.
        watchers: The watchers.
        receiver: The task that receives the run's deltas from the channel layer.
        broadcaster: The task that broadcasts deltas when this process holds the run's lock.
    """

    broadcasted: asyncio.Event = field(default_factory=asyncio.Event)
    looked_at: float = field(default_factory=time.monotonic)
    watchers: set[Watcher] = field(default_factory=set)
    receiver: asyncio.Task[None] | None = None
    broadcaster: asyncio.Task[None] | None = None

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """List the tasks that were started."""
        return [task for task in (self.receiver, self.broadcaster) if task is not None]

    def start(self, run: str) -> None:
        """Start both tasks in the running event loop."""
        subscribed = asyncio.Event()
        self.receiver = asyncio.create_task(
            receive_deltas(run, self.watchers, subscribed), name=f"receive deltas of {run}"
        )
        self.broadcaster = asyncio.create_task(
            broadcast_deltas(run, subscribed, self._on_looked), name=f"broadcast deltas of {run}"
        )

    def _on_looked(self, is_healthy: bool) -> None:
        """Record that the broadcaster has looked at the run, with or without success."""
        self.broadcasted.set()
        if is_healthy:
            self.looked_at = time.monotonic()

    def silence(self) -> float:
        """Return for how many seconds the broadcaster has failed; 0 for a run that was deleted."""
        task = self.broadcaster
        was_deleted = (
            task is not None
            and task.done()
            and not task.cancelled()
            and task.exception() is None  # a broadcaster returns for no other reason
        )
        return 0.0 if was_deleted else time.monotonic() - self.looked_at

    def is_running(self) -> bool:
        """Return whether both tasks run in the current event loop."""
        loop = asyncio.get_running_loop()
        return all(not task.done() and task.get_loop() is loop for task in self.tasks)

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel the tasks of the current event loop and return those that still have to end."""
        loop = asyncio.get_running_loop()
        ending = [task for task in self.tasks if not task.done() and task.get_loop() is loop]
        for task in ending:
            task.cancel()
        return ending


class WatcherRegistry:
    """The watched runs of this process.

    The first watcher of a run starts its tasks, the last one stops them.
    """

    def __init__(self) -> None:
        self._runs: dict[str, WatchedRun] = {}

    def watched_run(self, run: str) -> WatchedRun | None:
        """Return the entry of a run, or None if nobody watches it here."""
        return self._runs.get(run)

    def longest_silence(self) -> float:
        """Return for how many seconds the broadcaster of a watched run has failed; 0 for none."""
        return max((watched.silence() for watched in list(self._runs.values())), default=0.0)

    async def subscribe(self, run: str, watcher: Watcher) -> None:
        """Add a watcher; return once the broadcaster has looked at the run.

        A snapshot that is fetched after this returns has a number that deltas continue from.
        """
        watched = self._runs.get(run)
        if watched is None or not watched.is_running():
            if watched is not None:
                watched.cancel()  # one of its tasks ended, and the other is of no use alone
            watched = self._runs[run] = WatchedRun()
            watched.start(run)
        watched.watchers.add(watcher)
        await watched.broadcasted.wait()

    async def unsubscribe(self, run: str, watcher: Watcher) -> None:
        """Remove a watcher; when it was the last, stop the run's tasks and wait for them."""
        watched = self._runs.get(run)
        if watched is None:
            return
        watched.watchers.discard(watcher)
        if not watched.watchers:
            del self._runs[run]
            if ending := watched.cancel():
                await asyncio.wait(ending)


watchers = WatcherRegistry()


async def receive_deltas(run: str, watchers: set[Watcher], subscribed: asyncio.Event) -> None:
    """Subscribe this process to the run's channel and forward each delta to all its watchers.

    Runs until cancelled. `subscribed` is set after the first attempt to subscribe, even a failed
    one: the watchers then get their snapshot, or learn that the site is unavailable.
    """
    layer = get_channel_layer()
    assert layer is not None
    while True:
        try:
            channel = await layer.new_channel()
            await layer.group_add(channel_group(run), channel)
            break
        except (redis.exceptions.RedisError, OSError) as error:
            log.info("cannot subscribe to the deltas of run %s yet: %s", run, error)
            subscribed.set()
            await asyncio.sleep(BROADCAST_SECONDS)
    subscribed.set()
    try:
        while True:
            message = await layer.receive(channel)
            await fan_out(watchers, message["text"])
    finally:
        await layer.group_discard(channel_group(run), channel)


async def fan_out(watchers: set[Watcher], text: str) -> None:
    """Queue a delta for every watcher, in batches.

    A watcher that subscribes in between is left out: the snapshot that it fetches contains this
    delta.
    """
    recipients = list(watchers)
    deadline = time.monotonic() + FAN_OUT_SECONDS
    for first in range(0, len(recipients), FAN_OUT_BATCH):
        for watcher in recipients[first : first + FAN_OUT_BATCH]:
            watcher.queue_delta(text)
        if time.monotonic() < deadline:
            await asyncio.sleep(FAN_OUT_PAUSE_SECONDS)


def choose_pause(spent: float) -> float:
    """Return the pause after a look at a run that took `spent` seconds. Pure.

    With tens of thousands of machines a look takes a second of a core. The pause leaves as much of
    it to requests, and is short enough to renew the lock in time.
    """
    return max(BROADCAST_SECONDS - spent, min(spent, BROADCAST_SECONDS))


async def broadcast_deltas(
    run: str, subscribed: asyncio.Event, on_looked: Callable[[bool], None]
) -> None:
    """Send the run's deltas, with pauses, whenever this process holds the run's lock.

    Runs until cancelled or until the run is deleted. While the database or Valkey is away nothing
    is sent; watchers notice that, and sending resumes by itself.

    Args:
        run: The run's id.
        subscribed: What to wait for first, so that this process receives its own first delta.
        on_looked: Called after each look at the run, with whether it succeeded.
    """
    await subscribed.wait()
    broadcaster = Broadcaster(run)
    next_delta = database_sync_to_async(broadcaster.next_delta)
    release_lock = database_sync_to_async(broadcaster.release_lock)
    layer = get_channel_layer()
    assert layer is not None
    is_healthy = True
    try:
        while True:
            started = time.monotonic()
            try:
                if text := await next_delta():
                    await layer.group_send(channel_group(run), {"type": "live.frame", "text": text})
                is_healthy = True
            except (redis.exceptions.RedisError, DatabaseError, OSError) as error:
                broadcaster.last_snapshot = None
                if is_healthy:
                    log.warning("cannot broadcast run %s for now: %s", run, error)
                is_healthy = False
            except Run.DoesNotExist:
                return
            finally:
                on_looked(is_healthy)
            await asyncio.sleep(choose_pause(time.monotonic() - started))
    finally:
        try:
            await release_lock()
        except (redis.exceptions.RedisError, OSError) as error:
            log.info("the broadcast lock of run %s is left to expire: %s", run, error)
