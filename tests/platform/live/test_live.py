"""Watching a run: a real Postgres, a real Valkey, and sockets on the site's own ASGI application."""

import asyncio
import json
import time
from dataclasses import replace

import pytest
from asgiref.sync import sync_to_async
from django.test import Client
from helpers.websocket_client import SECONDS, WatcherSocket

from barnraise.protocol import reports
from barnraise.protocol.signing import digest
from coordinator.lib.valkey import valkey_client
from coordinator.live import broadcaster as live
from coordinator.live import run_snapshot
from coordinator.live.broadcaster import Broadcaster
from coordinator.live.run_snapshot import COLUMNS, RunSnapshot, build_delta, loss_series
from coordinator.live.snapshot_cache import SnapshotCache
from coordinator.telemetry import run_table

pytestmark = pytest.mark.django_db(transaction=True)


async def snapshot(run, client: Client | None = None) -> dict:
    answer = await sync_to_async((client or Client()).get)(f"/live/{run.pk}/")
    assert answer.status_code == 200
    return json.loads(answer.content)


@pytest.fixture
def training(person, launched_run, numbered_report, transactional_db):
    """(run, its owner's volunteer, report(seq)): training, with one report in."""
    run, volunteer = launched_run(person())

    def report(seq: int, **changed):
        answer = volunteer.report(run, numbered_report(seq, **changed))
        assert answer.status_code == 200, answer.content

    report(1)
    return run, volunteer, report


async def test_a_watcher_gets_a_snapshot_and_then_the_deltas_that_follow_it(training):
    run, volunteer, report = training
    socket = await WatcherSocket(run.pk).open()
    first = await snapshot(run)
    assert first["type"] == "snapshot" and first["run"]["status"] == "training"
    assert first["run"]["tokens"] == 1000 and first["run"]["workers_alive"] == 1
    assert first["train"] == [[1000, 5.0]]
    (row,) = first["workers"]
    assert set(row) == set(COLUMNS) and row["name"] == volunteer.machine.hostname and row["alive"]

    point = reports.MeasuredLoss(kind="validation", tokens=2000, loss=4.25)
    await sync_to_async(report)(2, points=[point])
    news = await socket.next_frame(lambda frame: frame.get("validation"))
    assert news["type"] == "delta" and news["validation"] == [[2000, 4.25]]
    assert news["run"]["tokens"] == 2000 and "budget" not in news["run"]
    assert [worker["id"] for worker in news["workers"]] == [str(volunteer.machine.pk)]
    assert news["seq"] > first["seq"]
    await socket.leave()


async def test_a_plan_is_told_once_and_again_only_when_it_changed(training, plan):
    run, volunteer, report = training
    machine = str(volunteer.machine.pk)
    assert (await snapshot(run))["plans"] == {}
    speaker = Broadcaster(str(run.pk))
    await sync_to_async(report)(2, plan=plan, step_seconds=5.1)
    first = json.loads(await sync_to_async(speaker.next_delta)())
    assert (
        first["plans"] == {machine: plan.model_dump()}
        and first["workers"][0]["step_seconds"] == 5.1
    )
    await sync_to_async(report)(3, plan=plan, step_seconds=5.2)
    second = json.loads(await sync_to_async(speaker.next_delta)())
    assert "plans" not in second and second["workers"][0]["step_seconds"] == 5.2
    changed = plan.model_copy(update={"predicted_seconds": 4.0})
    await sync_to_async(report)(4, plan=changed, step_seconds=5.2)
    assert json.loads(await sync_to_async(speaker.next_delta)())["plans"] == {
        machine: changed.model_dump()
    }
    assert (await snapshot(run))["plans"] == {machine: changed.model_dump()}


async def test_deltas_are_numbered_without_gap_and_match_a_later_snapshot(training):
    run, _, report = training
    socket = await WatcherSocket(run.pk).open()
    first = await snapshot(run)
    told: dict[int, float] = dict(first["train"])
    numbers = []
    for seq in range(2, 5):
        await sync_to_async(report)(seq)
        frame = await socket.next_frame(lambda frame: frame.get("train"))
        numbers.append(frame["seq"])
        told |= dict(frame["train"])
    assert numbers == sorted(set(numbers))
    again = await snapshot(run)
    assert again["seq"] >= numbers[-1]
    assert dict(again["train"]) == told == {seq * 1000: 5.0 for seq in range(1, 5)}
    await socket.leave()


async def test_a_new_speaker_leaves_a_gap_and_a_snapshot_closes_it(training):
    run, _, report = training
    before = Broadcaster(str(run.pk))
    said = json.loads(await sync_to_async(before.next_delta)())
    await sync_to_async(report)(2)
    lost = json.loads(
        await sync_to_async(before.next_delta)()
    )  # said just before it died; not every watcher heard it
    assert lost["seq"] == said["seq"] + 1 and lost["train"]
    await sync_to_async(valkey_client().delete)(live.lock_key(run.pk))

    after = Broadcaster(str(run.pk))
    fresh = json.loads(await sync_to_async(after.next_delta)())
    assert fresh["seq"] == lost["seq"] + 2, "watchers must see that something may be missing"
    whole = await snapshot(run)
    assert whole["seq"] == fresh["seq"] and [2000, 5.0] in whole["train"]
    await sync_to_async(report)(3)
    following = json.loads(await sync_to_async(after.next_delta)())
    assert following["seq"] == whole["seq"] + 1 and following["train"] == [[3000, 5.0]]


def test_snapshot_while_broadcasting_is_served_without_reading_the_run(training, monkeypatch):
    run, _, report = training
    speaker = Broadcaster(str(run.pk))
    assert speaker.next_delta()
    report(2)
    said = json.loads(
        speaker.next_delta()
    )  # not sent yet: a later watcher finds it in the snapshot
    monkeypatch.setattr(RunSnapshot, "capture", None)
    whole = json.loads(SnapshotCache().get(run))  # another process, that has made none
    assert whole["seq"] == said["seq"] and whole["run"]["tokens"] == 2000
    assert [row["step"] for row in whole["workers"]] == [row["step"] for row in said["workers"]]
    assert whole["train"] == [[1000, 5.0], [2000, 5.0]] and whole["events"] and whole["mirror"]
    report(3)
    speaker.release_lock()
    monkeypatch.undo()
    assert json.loads(SnapshotCache().get(run))["run"]["tokens"] == 3000, (
        "nobody speaks: it is made afresh"
    )


async def test_watchers_are_told_a_few_at_a_time_and_all_of_them_soon(monkeypatch):
    async def send(message: dict) -> None:
        raise AssertionError("nobody takes anything out of its queue here")

    monkeypatch.setattr(live, "FAN_OUT_BATCH", 2)
    here = {live.Watcher(send) for _ in range(7)}

    def reached() -> int:
        return sum(watcher.pending > 0 for watcher in here)

    telling = asyncio.create_task(live.fan_out(here, "one"))
    await asyncio.sleep(0)
    assert reached() == 2, "others get their turn in between"
    late = live.Watcher(send)
    here.add(late)
    await telling
    assert reached() == 7 and late.pending == 0, "its snapshot has it already"
    monkeypatch.setattr(live, "FAN_OUT_SECONDS", 0.0)
    telling = asyncio.create_task(live.fan_out(here, "two"))
    await asyncio.sleep(0)
    assert telling.done() and late.pending, "when time is up the rest are told at once"


def test_one_process_speaks_and_another_takes_over_when_it_falls_silent(training, monkeypatch):
    run, _, _ = training
    monkeypatch.setattr(live, "LOCK_MILLISECONDS", 300)
    one, two = Broadcaster(str(run.pk)), Broadcaster(str(run.pk))
    assert one.next_delta() and two.next_delta() is None
    wait_until(lambda: not valkey_client().exists(live.lock_key(run.pk)))
    assert two.next_delta() and one.next_delta() is None
    one.release_lock()
    assert valkey_client().get(live.lock_key(run.pk)) == two.token, "only the holder can release"
    two.release_lock()
    assert one.next_delta()


def test_numbers_go_on_rising_after_valkey_forgot_them(training):
    run, _, _ = training
    one = Broadcaster(str(run.pk))
    before = json.loads(one.next_delta())["seq"]
    valkey_client().flushall()
    assert json.loads(one.next_delta())["seq"] > before


def test_next_delta_without_changes_is_none_until_keepalive_is_due(training):
    run, _, _ = training
    one = Broadcaster(str(run.pk))
    assert one.next_delta()
    one.last_snapshot = replace(
        one.last_snapshot, now=one.last_snapshot.now + 60
    )  # no rate point is due
    assert one.next_delta() is None
    one.last_sent -= live.KEEPALIVE_SECONDS
    assert json.loads(one.next_delta()).keys() == {"type", "now", "seq"}


def test_a_delta_is_what_changed_and_nothing_else():
    before = RunSnapshot(
        10.0, {"tokens": 1, "status": "training", "rate": 5.0}, {"a": {"id": "a", "step": 1}}
    )
    after = RunSnapshot(
        11.0,
        {**before.run, "tokens": 2},
        {"a": {"id": "a", "step": 1}, "b": {"id": "b", "step": 0}},
    )
    assert build_delta(before, after, []) == {
        "type": "delta", "now": 11.0, "run": {"tokens": 2}, "workers": [{"id": "b", "step": 0}],
    }  # fmt: skip
    assert build_delta(None, after, [])["run"] == after.run
    assert build_delta(before, before, []) == {"type": "delta", "now": 10.0}
    assert build_delta(after, replace(before, run=after.run), [])["gone"] == ["b"]


def test_of_many_machines_those_alive_are_shown_and_all_are_counted(
    person, launched_run, volunteer, numbered_report, monkeypatch
):
    monkeypatch.setattr(run_snapshot, "MAX_ROWS", 2)
    run, ada = launched_run(person())
    others = [volunteer(person(f"p{n}@example.org", name=f"p{n}"), n) for n in (2, 3, 4)]
    for each in others:
        each.join(run)
    for n, each in enumerate((ada, *others)):
        each.report(run, numbered_report(1, activity="left" if n < 2 else "training"))
    seen = run_snapshot.RunSnapshot.capture(run)
    assert set(seen.workers) == {str(each.machine.pk) for each in others[1:]}
    assert (seen.run["workers_known"], seen.run["workers_alive"]) == (4, 2)


def test_machines_that_measured_at_the_same_count_are_one_point():
    points = [
        {"kind": "train", "tokens": t, "loss": loss}
        for t, loss in ((20, 4.0), (10, 5.0), (20, 3.0))
    ]
    assert loss_series(points, "train") == [[10, 5.0], [20, 3.5]]
    assert loss_series(points, "validation") == []


def test_the_snapshot_says_whether_machines_with_the_same_updates_agree(
    training, volunteer, person, numbered_report
):
    run, _, report = training
    other = volunteer(person("bob@example.org"), seed=2)
    other.join(run)
    same = digest("vector")
    report(2, vector=same, anchor=digest("weights"))
    assert Client().get(f"/live/{run.pk}/").json()["run"]["agree"] is None
    other.report(run, numbered_report(1, vector=same, anchor=digest("weights")))
    assert Client().get(f"/live/{run.pk}/").json()["run"]["agree"] is True
    other.report(run, numbered_report(2, vector=same, anchor=digest("other weights")))
    assert Client().get(f"/live/{run.pk}/").json()["run"]["agree"] is False
    assert run_table.weights_agree([]) is None


def test_a_machine_agrees_with_what_most_at_its_vector_hold(
    training, volunteer, person, numbered_report
):
    run, ada, report = training
    others = [volunteer(person(f"p{n}@example.org", name=f"p{n}"), n) for n in (2, 3, 4)]
    for each in others:
        each.join(run)
    report(2, vector=digest("vector"), anchor=digest("weights"))
    told = (("vector", "weights"), ("vector", "others"), ("a later one", "weights"))
    for each, (vector, weights) in zip(others, told, strict=True):
        each.report(run, numbered_report(1, vector=digest(vector), anchor=digest(weights)))
    found = {row["id"]: row["agrees"] for row in run_table.machine_rows(run)}
    assert [found[str(each.machine.pk)] for each in (ada, *others)] == [True, True, False, None]
    others[0].report(run, numbered_report(2, activity="left"))
    found = {row["id"]: row["agrees"] for row in run_table.machine_rows(run)}
    assert [found[str(each.machine.pk)] for each in (ada, others[1])] == [False, False], (
        "of two neither is right"
    )


async def test_socket_of_draft_is_open_to_its_owner_only(person, draft, valkey):
    owner = await sync_to_async(person)()
    run = await sync_to_async(draft)(owner)
    stranger = await WatcherSocket(run.pk).open()
    closed = await stranger.receive_output(SECONDS)
    assert closed["type"] == "websocket.close" and closed["code"] == 4404
    assert (await sync_to_async(Client().get)(f"/live/{run.pk}/")).status_code == 404

    client = Client()
    await sync_to_async(client.force_login)(owner)
    socket = await WatcherSocket(run.pk, client).open()
    assert (await socket.next_frame())["run"]["status"] == "draft"
    assert (await snapshot(run, client))["run"]["status"] == "draft"
    await socket.leave()


async def test_the_socket_of_a_run_that_is_not_there_is_closed(valkey, db):
    socket = await WatcherSocket("0199aaaa-0000-7000-8000-000000000000").open()
    assert (await socket.receive_output(SECONDS))["code"] == 4404


@pytest.mark.parametrize("run", ["not-a-run", "../../admin"])
async def test_a_socket_to_nowhere_is_refused(valkey, db, run):
    assert await WatcherSocket(run).connect() == {"type": "websocket.close"}


async def test_a_site_of_another_origin_may_not_watch_with_a_visitors_cookies(training):
    run, _, _ = training
    assert (await WatcherSocket(run.pk, origin="https://evil.example").connect())[
        "type"
    ] == "websocket.close"


async def test_two_watchers_get_the_same_deltas_and_the_last_stops_broadcasting(training):
    run, _, report = training
    one, two = await WatcherSocket(run.pk).open(), await WatcherSocket(run.pk).open()
    await sync_to_async(report)(2)
    heard_by = await asyncio.gather(
        *(socket.next_frame(lambda frame: frame.get("train")) for socket in (one, two))
    )
    assert heard_by[0] == heard_by[1]
    await one.leave()
    assert await sync_to_async(valkey_client().exists)(live.lock_key(run.pk))
    await two.leave()
    assert not await sync_to_async(valkey_client().exists)(live.lock_key(run.pk))
    assert live.watchers.watched_run(str(run.pk)) is None


async def test_subscribe_after_receiver_ended_restarts_both_tasks(
    training,
):
    run, _, report = training
    one = await WatcherSocket(run.pk).open()
    receiver, broadcaster = live.watchers.watched_run(str(run.pk)).tasks
    receiver.cancel()
    await asyncio.wait([receiver])
    two = await WatcherSocket(run.pk).open()
    await asyncio.wait([broadcaster], timeout=SECONDS)
    assert broadcaster.cancelled(), "it would broadcast for ever, to nobody"
    await sync_to_async(report)(2)
    assert await two.next_frame(lambda frame: frame.get("train"))
    await one.leave()
    await two.leave()
    assert live.watchers.watched_run(str(run.pk)) is None


async def test_what_a_watcher_says_changes_nothing(training):
    run, _, report = training
    socket = await WatcherSocket(run.pk).open()
    await socket.send_input(
        {"type": "websocket.receive", "text": '{"type": "delta", "run": {"status": "finished"}}'}
    )
    await sync_to_async(report)(2)
    assert await socket.next_frame(lambda frame: frame.get("train"))
    assert (await snapshot(run))["run"]["status"] == "training"
    await socket.leave()


def wait_until(true, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)
