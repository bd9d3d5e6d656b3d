"""Celery as it runs: a worker and a beat of their own, on the test database."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
from django.db import connection
from django.db.models import Sum
from django.utils import timezone
from django_celery_beat.models import PeriodicTask
from helpers.paths import ROOT
from kombu.exceptions import OperationalError

from barnraise.protocol import enums
from coordinator.celery import app
from coordinator.fleet.models import Membership
from coordinator.lib.beat_scheduler import ResilientScheduler
from coordinator.lib.valkey import valkey_client
from coordinator.telemetry import report_queue
from coordinator.telemetry.models import BUCKET_SECONDS, LossPoint, Rollup

CELERY = [sys.executable, "-m", "celery", "-A", "coordinator.celery:app"]


@pytest.fixture
def celery(state, transactional_db, tmp_path):
    """Starts `celery …` against the database of this test; ends what is left of it afterwards."""
    name = connection.settings_dict["NAME"]
    url = urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{name}").geturl()
    paths = os.pathsep.join([str(ROOT / "platform"), str(ROOT / "worker")])
    started = []

    def start(*arguments: str) -> subprocess.Popen:
        with (tmp_path / f"celery-{len(started)}.log").open("wb") as log:
            process = subprocess.Popen(
                [*CELERY, *arguments],
                cwd=tmp_path,
                env={**os.environ, "DATABASE_URL": url, "PYTHONPATH": paths},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()


def wait(done, seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_reports_reach_postgres_although_the_worker_is_killed_midway(
    celery, person, draft, manifest, volunteer, numbers
):
    run = draft(person())
    ada = volunteer(run.owner)
    run.launch()
    ada.ask("POST", f"/runs/{run.slug}/manifest", ada.identity.sign("manifest", manifest(run)))
    ada.join(run)
    total, batch = 1200, 5
    for first in range(1, total + 1, batch):
        assert (
            ada.report(run, *(numbers(i) for i in range(first, first + batch))).status_code == 200
        )
    worker = celery("worker", "-P", "solo", "--loglevel", "INFO")
    celery("beat", "--loglevel", "INFO", "--pidfile=")
    locked = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted"
    with connection.cursor() as cursor:
        wait(lambda: cursor.execute(locked) or cursor.fetchone())
    worker.send_signal(signal.SIGKILL)  # while it drains
    worker.wait()
    celery("worker", "-P", "solo", "--loglevel", "INFO")
    wait(lambda: Membership.objects.get(run=run).mark == total)
    assert LossPoint.objects.count() == total
    assert Rollup.objects.filter(width=BUCKET_SECONDS).aggregate(
        reports=Sum("reports"), tokens=Sum("tokens")
    ) == {
        "reports": total,
        "tokens": total * 1000,
    }
    wait(lambda: not valkey_client().exists(report_queue.PENDING_KEY))

    def status() -> enums.RunStatus:
        run.refresh_from_db()
        return run.state

    wait(lambda: status() is enums.RunStatus.TRAINING and run.ledger_tokens == total * 1000)


def test_a_worker_that_lost_valkey_asks_every_second_for_good():
    waits: list[float] = []
    with app.amqp.Connection("redis://127.0.0.1:9/0") as broker, pytest.raises(OperationalError):
        broker.ensure_connection(lambda error, seconds: waits.append(seconds), 3)
    assert waits == [1.0, 1.0, 1.0]
    assert app.conf.broker_connection_max_retries is None


@pytest.fixture
def beat(transactional_db):
    """Makes a schedule as beat has it, which does not write itself down when this process ends."""

    def make() -> ResilientScheduler:
        made = ResilientScheduler(app)
        made._finalize.cancel()
        return made

    return make


def test_schedule_is_unchanged_while_postgres_is_away(beat, monkeypatch):
    schedule = beat()
    known = set(schedule.schedule)
    assert "mirrors" in known
    connection.close()
    with monkeypatch.context() as away:
        away.setitem(connection.settings_dict, "PORT", "1")
        schedule._last_full_sync -= timedelta(minutes=6)
        assert set(schedule.schedule) == known
    PeriodicTask.objects.filter(name="mirrors").update(enabled=False)
    schedule._last_full_sync -= timedelta(minutes=6)
    assert set(schedule.schedule) == known - {"mirrors"}, "it is read again once that can be"


def test_a_clock_that_was_ahead_and_is_put_right_holds_nothing_up(beat, monkeypatch):
    """Neither in a beat that runs through it, nor in one that starts afterwards and reads of runs still to come."""
    hour, ran = timedelta(hours=1), []
    monkeypatch.setattr(
        ResilientScheduler, "apply_entry", lambda self, entry, **_: ran.append(entry.name)
    )
    schedule = beat()
    schedule.tick()
    schedule._clock_offset += (
        hour.total_seconds()
    )  # as it is after some time with a clock an hour ahead
    schedule._heap = [at._replace(time=at.time + hour.total_seconds()) for at in schedule._heap]
    for entry in schedule.schedule.values():
        entry.last_run_at += hour
    PeriodicTask.objects.update(last_run_at=timezone.now() + hour)
    often = {"mirrors", "drain_reports", "pull_remote_telemetry", "advance_runs"}
    for each in (schedule, beat()):
        ran.clear()
        end = time.monotonic() + 15
        while not often <= set(ran):
            assert time.monotonic() < end, often - set(ran)
            time.sleep(max(0.0, min(0.1, each.tick())))
