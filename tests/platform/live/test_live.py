"""Test watching a run: sockets on the site's own ASGI application, real Postgres and Valkey."""

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
from coordinator.live.run_snapshot import COLUMNS, RunSnapshot, build_delta, mean_series
from coordinator.live.snapshot_cache import SnapshotCache
from coordinator.runs.models import Run
from coordinator.telemetry import run_table

pytestmark = pytest.mark.django_db(transaction=True)


async def snapshot(run, client: Client | None = None) -> dict:
    response = await sync_to_async((client or Client()).get)(f"/live/{run.pk}/")
    assert response.status_code == 200
    return json.loads(response.content)


def agreement(run) -> bool | None:
    """Return whether the run's machines agree, as a snapshot shows it."""
    return Client().get(f"/live/{run.pk}/").json()["run"]["agree"]


@pytest.fixture
def training(person, launched_run, numbered_report, transactional_db):
    """Return (a training run, its owner's volunteer, report(seq)), with one report received."""
    run, volunteer = launched_run(person())

    def report(seq: int, **changed):
        response = volunteer.report(run, numbered_report(seq, **changed))
        assert response.status_code == 200, response.content

    report(1)
    return run, volunteer, report


async def test_watcher_receives_deltas_that_follow_its_snapshot(training):
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
    delta = await socket.next_frame(lambda frame: frame.get("validation"))
    assert delta["type"] == "delta" and delta["validation"] == [[2000, 4.25]]
    assert delta["run"]["tokens"] == 2000 and "budget" not in delta["run"]
    assert [worker["id"] for worker in delta["worker_changes"]] == [str(volunteer.machine.pk)]
    assert delta["seq"] > first["seq"]
    await socket.leave()


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


async def test_deltas_are_numbered_without_gap_and_match_a_later_snapshot(training):
    run, _, report = training
    socket = await WatcherSocket(run.pk).open()
    first = await snapshot(run)
    losses: dict[int, float] = dict(first["train"])
    numbers = []
    for seq in range(2, 5):
        await sync_to_async(report)(seq)
        frame = await socket.next_frame(lambda frame: frame.get("train"))
        numbers.append(frame["seq"])
        losses |= dict(frame["train"])
    assert numbers == sorted(set(numbers))
    again = await snapshot(run)
    assert again["seq"] >= numbers[-1]
    assert dict(again["train"]) == losses == {seq * 1000: 5.0 for seq in range(1, 5)}
    await socket.leave()


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


def test_snapshot_while_broadcasting_is_served_without_reading_the_run(training, monkeypatch):
    run, _, report = training
    broadcaster = Broadcaster(str(run.pk))
    assert broadcaster.next_delta()
    report(2)
    # This delta is not sent yet: a later watcher finds it in the snapshot.
    unsent = json.loads(broadcaster.next_delta())
    monkeypatch.setattr(RunSnapshot, "capture", None)
    stored = json.loads(SnapshotCache().get(run))  # the cache of a process that has built none
    assert stored["seq"] == unsent["seq"] and stored["run"]["tokens"] == 2000
    assert [row["step"] for row in stored["workers"]] == [
        row["step"] for row in unsent["worker_changes"]
    ]
    assert stored["train"] == [[1000, 5.0], [2000, 5.0]] and stored["events"] and stored["mirror"]
    report(3)
    broadcaster.release_lock()
    monkeypatch.undo()
    built = json.loads(SnapshotCache().get(run))
    assert built["run"]["tokens"] == 3000, "without a broadcaster it is built from the database"


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
    valkey_client().pexpire(lock, 1)
    wait_until(lambda: not valkey_client().exists(lock))
    assert two.next_delta() and one.next_delta() is None
    one.release_lock()
    assert valkey_client().get(lock) == two.token, "only the holder can release"
    two.release_lock()
    assert one.next_delta()


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


def test_delta_has_the_machines_that_reported_and_no_others(
    person, launched_run, volunteer, numbered_report
):
    run, ada = launched_run(person())
    bob = volunteer(person("bob@example.org"), 2)
    bob.join(run)
    for reporter in (ada, bob):
        reporter.report(run, numbered_report(1))
    before = RunSnapshot.capture(run)
    ada.report(run, numbered_report(2))
    Run.objects.filter(pk=run.pk).update(ledger_tokens=9000)
    run.refresh_from_db()
    delta = build_delta(before, RunSnapshot.capture(run), [])
    assert [row["id"] for row in delta["worker_changes"]] == [str(ada.machine.pk)]
    assert "name" not in delta["worker_changes"][0] and "workers" not in delta


def test_snapshot_of_many_machines_lists_alive_and_counts_all(
    person, launched_run, volunteer, numbered_report, monkeypatch
):
    monkeypatch.setattr(run_snapshot, "MAX_ROWS", 2)
    run, ada = launched_run(person())
    others = [volunteer(person(f"p{n}@example.org", name=f"p{n}"), n) for n in (2, 3, 4)]
    for member in others:
        member.join(run)
    for n, reporter in enumerate((ada, *others)):
        reporter.report(run, numbered_report(1, activity="left" if n < 2 else "training"))
    captured = RunSnapshot.capture(run)
    assert set(captured.workers) == {str(alive.machine.pk) for alive in others[1:]}
    assert (captured.run["workers_known"], captured.run["workers_alive"]) == (4, 2)


def test_snapshot_of_an_ended_run_has_the_time_of_its_end(person, launched_run):
    run, _ = launched_run(person())
    assert RunSnapshot.capture(run).run["ended"] is None
    assert run.finish()
    run.refresh_from_db()
    assert RunSnapshot.capture(run).run["ended"] == round(run.finished.timestamp(), 3)


def test_mean_series_averages_values_at_the_same_token_count():
    points = [
        {"kind": "train", "tokens": tokens, "loss": loss}
        for tokens, loss in ((20, 4.0), (10, 5.0), (20, 3.0))
    ]
    assert mean_series(points, "loss") == [[10, 5.0], [20, 3.5]]
    assert mean_series(points, "learning_rate") == []


def test_snapshot_shows_whether_machines_with_equal_updates_agree(
    training, volunteer, person, numbered_report
):
    run, _, report = training
    other = volunteer(person("bob@example.org"), seed=2)
    other.join(run)
    same = digest("vector")
    report(2, vector=same, anchor=digest("weights"))
    assert agreement(run) is None
    other.report(run, numbered_report(1, vector=same, anchor=digest("weights")))
    assert agreement(run) is True
    other.report(run, numbered_report(2, vector=same, anchor=digest("other weights")))
    assert agreement(run) is False
    assert run_table.weights_agree([]) is None


def test_machine_agrees_with_the_majority_at_its_vector(
    training, volunteer, person, numbered_report
):
    run, ada, report = training
    others = [volunteer(person(f"p{n}@example.org", name=f"p{n}"), n) for n in (2, 3, 4)]
    for member in others:
        member.join(run)

    def agreements(*members) -> list[bool | None]:
        agrees = {row["id"]: row["agrees"] for row in run_table.machine_rows(run)}
        return [agrees[str(member.machine.pk)] for member in members]

    report(2, vector=digest("vector"), anchor=digest("weights"))
    reported = (("vector", "weights"), ("vector", "others"), ("a later one", "weights"))
    for member, (vector, weights) in zip(others, reported, strict=True):
        member.report(run, numbered_report(1, vector=digest(vector), anchor=digest(weights)))
    assert agreements(ada, *others) == [True, True, False, None]
    others[0].report(run, numbered_report(2, activity="left"))
    assert agreements(ada, others[1]) == [False, False], "of two machines there is no majority"


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


async def test_socket_of_unknown_run_is_closed(valkey, db):
    socket = await WatcherSocket("0199aaaa-0000-7000-8000-000000000000").open()
    assert (await socket.receive_output(SECONDS))["code"] == 4404


@pytest.mark.parametrize("run", ["not-a-run", "../../admin"])
async def test_socket_with_malformed_run_id_is_refused(valkey, db, run):
    assert await WatcherSocket(run).connect() == {"type": "websocket.close"}


async def test_socket_from_foreign_origin_is_refused(training):
    run, _, _ = training
    reply = await WatcherSocket(run.pk, origin="https://evil.example").connect()
    assert reply["type"] == "websocket.close"


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


async def test_messages_from_a_watcher_are_ignored(training):
    run, _, report = training
    socket = await WatcherSocket(run.pk).open()
    await socket.send_input(
        {"type": "websocket.receive", "text": '{"type": "delta", "run": {"status": "finished"}}'}
    )
    await sync_to_async(report)(2)
    assert await socket.next_frame(lambda frame: frame.get("train"))
    assert (await snapshot(run))["run"]["status"] == "training"
    await socket.leave()


def wait_until(condition, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.02)
