"""Test watching a run: sockets on the site's own ASGI application, real Postgres and Valkey."""

import json

import pytest
from asgiref.sync import sync_to_async
from django.test import Client
from helpers.site.websocket_client import SECONDS, WatcherSocket, snapshot

from barnraise.protocol import reports
from coordinator.live import run_snapshot
from coordinator.live.broadcaster import Broadcaster
from coordinator.live.run_snapshot import COLUMNS, RunSnapshot, mean_series
from coordinator.live.snapshot_cache import SnapshotCache

pytestmark = pytest.mark.django_db(transaction=True)


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


def test_snapshot_of_many_machines_lists_alive_and_counts_all(
    adas_run, numbered_report, monkeypatch, strangers
):
    monkeypatch.setattr(run_snapshot, "MAX_ROWS", 2)
    run, ada = adas_run
    others = strangers(run, 2, 3, 4)
    for n, reporter in enumerate((ada, *others)):
        reporter.report(run, numbered_report(1, activity="left" if n < 2 else "training"))
    captured = RunSnapshot.capture(run)
    assert set(captured.workers) == {str(alive.machine.pk) for alive in others[1:]}
    assert (captured.run["workers_known"], captured.run["workers_alive"]) == (4, 2)


def test_snapshot_of_an_ended_run_has_the_time_of_its_end(adas_run):
    run, _ = adas_run
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
