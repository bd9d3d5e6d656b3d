"""Test which process broadcasts a run, what it sends, and how its watchers receive it."""

import asyncio
import json
import time
from dataclasses import replace

import pytest
import redis.exceptions
from asgiref.sync import sync_to_async
from helpers.site.websocket_client import SECONDS, WatcherSocket, snapshot

from coordinator.lib.valkey import valkey_client
from coordinator.live import broadcaster as live
from coordinator.live.broadcaster import Broadcaster, WatchedRun
from coordinator.runs.models import Run

pytestmark = pytest.mark.django_db(transaction=True)


async def test_delta_contains_a_plan_only_when_it_changed(training, plan):
    run, volunteer, report = training
    machine = str(volunteer.machine.pk)
    assert (await snapshot(run))["plans"] == {}
    broadcaster = Broadcaster(str(run.pk))
    await sync_to_async(report)(2, plan=plan, step_seconds=5.1)
    first = json.loads(await sync_to_async(broadcaster.next_delta)())
    assert first["plans"] == {machine: plan.model_dump()}
    assert first["workers"][0]["step_seconds"] == 5.1
    await sync_to_async(report)(3, plan=plan, step_seconds=5.2)
    second = json.loads(await sync_to_async(broadcaster.next_delta)())
    assert "plans" not in second and second["worker_changes"][0]["step_seconds"] == 5.2
    changed = plan.model_copy(update={"predicted_seconds": 4.0})
    await sync_to_async(report)(4, plan=changed, step_seconds=5.2)
    third = json.loads(await sync_to_async(broadcaster.next_delta)())
    assert third["plans"] == {machine: changed.model_dump()}
    assert (await snapshot(run))["plans"] == {machine: changed.model_dump()}


async def test_new_broadcaster_leaves_a_gap_that_a_snapshot_closes(training):
    run, _, report = training
    before = Broadcaster(str(run.pk))
    first = json.loads(await sync_to_async(before.next_delta)())
    await sync_to_async(report)(2)
    # The broadcaster dies after this delta, so not every watcher receives it.
    lost = json.loads(await sync_to_async(before.next_delta)())
    assert lost["seq"] == first["seq"] + 1 and lost["train"]
    await sync_to_async(valkey_client().delete)(live.lock_key(run.pk))

    after = Broadcaster(str(run.pk))
    fresh = json.loads(await sync_to_async(after.next_delta)())
    assert fresh["seq"] == lost["seq"] + 2, "watchers must see that something may be missing"
    complete = await snapshot(run)
    assert complete["seq"] == fresh["seq"] and [2000, 5.0] in complete["train"]
    await sync_to_async(report)(3)
    following = json.loads(await sync_to_async(after.next_delta)())
    assert following["seq"] == complete["seq"] + 1 and following["train"] == [[3000, 5.0]]


async def test_fan_out_reaches_watchers_in_batches_within_its_time(monkeypatch):
    async def send(message: dict) -> None:
        raise AssertionError("no watcher empties its queue in this test")

    monkeypatch.setattr(live, "FAN_OUT_BATCH", 2)
    watchers = {live.Watcher(send) for _ in range(7)}

    def reached_count() -> int:
        return sum(watcher.pending > 0 for watcher in watchers)

    fan_out = asyncio.create_task(live.fan_out(watchers, "one"))
    await asyncio.sleep(0)
    assert reached_count() == 2, "other tasks run between batches"
    late = live.Watcher(send)
    watchers.add(late)
    await fan_out
    assert reached_count() == 7 and late.pending == 0, "the late watcher's snapshot has the message"
    monkeypatch.setattr(live, "FAN_OUT_SECONDS", 0.0)
    fan_out = asyncio.create_task(live.fan_out(watchers, "two"))
    await asyncio.sleep(0)
    assert fan_out.done() and late.pending, "after its time the fan-out reaches the rest at once"


def test_second_broadcaster_takes_over_when_the_lock_expires(training, monkeypatch):
    run, _, _ = training
    monkeypatch.setattr(live, "LOCK_MILLISECONDS", 600_000)
    one, two = Broadcaster(str(run.pk)), Broadcaster(str(run.pk))
    assert one.next_delta() and two.next_delta() is None
    lock = live.lock_key(run.pk)
    assert 0 < valkey_client().pttl(lock) <= 600_000, "a silent holder's lock would never expire"
    valkey_client().pexpire(lock, 0)
    assert two.next_delta() and one.next_delta() is None
    one.release_lock()
    assert valkey_client().get(lock) == two.token, "only the holder can release"
    two.release_lock()
    assert one.next_delta()


@pytest.mark.parametrize(("spent", "pause"), [(0.1, 0.9), (0.8, 0.8), (1.0, 1.0), (3.0, 1.0)])
def test_pause_leaves_half_a_core_and_renews_the_lock_in_time(spent, pause):
    assert live.choose_pause(spent) == pytest.approx(pause)
    assert spent + live.choose_pause(spent) < live.LOCK_MILLISECONDS / 1000


def test_delta_numbers_still_rise_after_valkey_lost_them(training):
    run, _, _ = training
    one = Broadcaster(str(run.pk))
    before = json.loads(one.next_delta())["seq"]
    valkey_client().flushall()
    assert json.loads(one.next_delta())["seq"] > before


def test_next_delta_without_changes_is_none_until_keepalive_is_due(training):
    run, _, _ = training
    one = Broadcaster(str(run.pk))
    assert one.next_delta()
    # A minute later no rate point is due.
    one.last_snapshot = replace(one.last_snapshot, now=one.last_snapshot.now + 60)
    assert one.next_delta() is None
    one.last_sent -= live.KEEPALIVE_SECONDS
    assert json.loads(one.next_delta()).keys() == {"type", "now", "seq"}


async def test_two_watchers_get_the_same_deltas_and_the_last_stops_broadcasting(training):
    run, _, report = training
    one, two = await WatcherSocket(run.pk).open(), await WatcherSocket(run.pk).open()
    await sync_to_async(report)(2)
    frames = await asyncio.gather(
        *(socket.next_frame(lambda frame: frame.get("train")) for socket in (one, two))
    )
    assert frames[0] == frames[1]
    await one.leave()
    assert await sync_to_async(valkey_client().exists)(live.lock_key(run.pk))
    await two.leave()
    assert not await sync_to_async(valkey_client().exists)(live.lock_key(run.pk))
    assert live.watchers.watched_run(str(run.pk)) is None


async def test_subscribe_after_receiver_ended_restarts_both_tasks(training):
    run, _, report = training
    one = await WatcherSocket(run.pk).open()
    receiver, broadcaster = live.watchers.watched_run(str(run.pk)).tasks
    receiver.cancel()
    await asyncio.wait([receiver])
    two = await WatcherSocket(run.pk).open()
    await asyncio.wait([broadcaster], timeout=SECONDS)
    assert broadcaster.cancelled(), "it would broadcast forever without watchers"
    await sync_to_async(report)(2)
    assert await two.next_frame(lambda frame: frame.get("train"))
    await one.leave()
    await two.leave()
    assert live.watchers.watched_run(str(run.pk)) is None


async def test_broadcasts_of_a_deleted_run_are_not_silent():
    async def fail() -> None:
        raise KeyError("a defect")

    async def return_as_for_a_deleted_run() -> None:
        return

    for ending, is_silent in ((fail, True), (return_as_for_a_deleted_run, False)):
        task = asyncio.create_task(ending())
        await asyncio.wait([task])
        watched = WatchedRun(looked_at=time.monotonic() - 40.0, broadcaster=task)
        assert (watched.silence() > 39) == is_silent


async def test_slow_watcher_misses_the_newest_deltas():
    received = []

    async def send(message: dict) -> None:
        received.append(message["text"])
        if len(received) == live.QUEUE_LENGTH:
            raise OSError("the socket is closed")

    slow = live.Watcher(send)
    for number in range(2 * live.QUEUE_LENGTH):
        await live.fan_out({slow}, str(number))
    assert slow.pending == live.QUEUE_LENGTH
    await asyncio.wait_for(slow.send_deltas(), SECONDS)  # it ends with its socket
    assert received == [str(number) for number in range(live.QUEUE_LENGTH)]


async def test_broadcaster_outlives_an_outage_and_ends_with_its_run(training, monkeypatch):
    run, _, _ = training
    looks: list[bool] = []
    next_delta = Broadcaster.next_delta

    def next_delta_in_an_outage(broadcaster: Broadcaster) -> str | None:
        if not looks:
            raise redis.exceptions.ConnectionError("Valkey is away")
        if len(looks) == 2:
            Run.objects.get(pk=run.pk).delete()
        return next_delta(broadcaster)

    monkeypatch.setattr(Broadcaster, "next_delta", next_delta_in_an_outage)
    monkeypatch.setattr(live, "BROADCAST_SECONDS", 0.0)
    subscribed = asyncio.Event()
    subscribed.set()
    broadcasts = live.broadcast_deltas(str(run.pk), subscribed, looks.append)
    await asyncio.wait_for(broadcasts, SECONDS)
    assert looks == [False, True, True]
    assert not await sync_to_async(valkey_client().exists)(live.lock_key(run.pk))
