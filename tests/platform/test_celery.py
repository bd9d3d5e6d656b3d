"""Test real processes of Celery, a worker and a beat, on the test database."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
import redis.exceptions
from celery import signals
from django.db import connection, transaction
from django.db.backends.signals import connection_created
from django.db.models import Sum
from django.utils import timezone
from django_celery_beat.models import PeriodicTask
from helpers.paths import ROOT
from helpers.wait_for import wait_until
from kombu.exceptions import OperationalError

from barnraise.protocol import enums
from coordinator.celery import STATEMENT_SECONDS, app, limit_statements
from coordinator.fleet.models import Membership
from coordinator.lib import beat_scheduler, heartbeats
from coordinator.lib.beat_scheduler import ResilientScheduler
from coordinator.lib.valkey import valkey_client
from coordinator.runs.spec_form import spec_from_fields
from coordinator.telemetry import report_queue
from coordinator.telemetry.models import BUCKET_SECONDS, LossPoint, Rollup

CELERY = [sys.executable, "-m", "celery", "-A", "coordinator.celery:app"]


@pytest.fixture
def start_celery(state, transactional_db, tmp_path):
    """Yield a function that starts `celery …` on this test's database; stop all at the end."""
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


@pytest.mark.slow  # tests/platform/demo/test_chaos.py kills the worker as well
def test_reports_are_stored_although_a_worker_is_killed(
    start_celery, person, draft, manifest, volunteer, numbered_report
):
    total, batch = 1200, 5
    # Losses beyond twice the budget are implausible and not stored.
    run = draft(person(), spec=spec_from_fields({"recipe.token_budget": 1000 * total, "seed": 7}))
    ada = volunteer(run.owner)
    run.launch()
    ada.post_manifest(run, manifest(run))
    ada.join(run)
    for first in range(1, total + 1, batch):
        assert (
            ada.report(run, *(numbered_report(i) for i in range(first, first + batch))).status_code
            == 200
        )
    worker = start_celery("worker", "-P", "solo", "--loglevel", "INFO")
    start_celery("beat", "--loglevel", "INFO", "--pidfile=")
    locked = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted"
    with transaction.atomic(), connection.cursor() as cursor:
        # While this row is locked, the worker cannot finish its transaction.
        Membership.objects.select_for_update().get(run=run)
        wait_until(lambda: cursor.execute(locked) or cursor.fetchone())
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    start_celery("worker", "-P", "solo", "--loglevel", "INFO")
    wait_until(lambda: Membership.objects.get(run=run).high_water_mark == total)
    assert LossPoint.objects.count() == total
    assert Rollup.objects.filter(width=BUCKET_SECONDS).aggregate(
        reports=Sum("reports"), tokens=Sum("tokens")
    ) == {"reports": total, "tokens": total * 1000}
    wait_until(lambda: not valkey_client().exists(report_queue.PENDING_KEY))

    def read_status() -> enums.RunStatus:
        run.refresh_from_db()
        return run.state

    # Only a machine that has reported of late starts a run; all this may have taken a minute.
    newest = numbered_report(total + 1, ledger_tokens=total * 1000, points=[])
    assert ada.report(run, newest).status_code == 200
    wait_until(
        lambda: read_status() is enums.RunStatus.TRAINING and run.ledger_tokens == total * 1000
    )
    valkey_client().delete(heartbeats.KEY)
    parts = {part.value for part in heartbeats.Part}
    wait_until(lambda: set(valkey_client().hgetall(heartbeats.KEY)) == parts)


def test_worker_that_lost_valkey_reconnects_every_second():
    waits: list[float] = []
    with app.amqp.Connection("redis://127.0.0.1:9/0") as broker, pytest.raises(OperationalError):
        broker.ensure_connection(lambda error, seconds: waits.append(seconds), 3)
    assert waits == [1.0, 1.0, 1.0]
    assert app.conf.broker_connection_max_retries is None


def test_worker_connects_again_to_a_valkey_that_refuses_to_write():
    """A Valkey whose disk is full answers MISCONF, which is no error of a connection."""
    assert app.conf.broker_channel_error_retry
    with app.connection_for_read() as broker:
        assert redis.exceptions.ResponseError in broker.channel_errors


@pytest.fixture
def beat(transactional_db):
    """Return a function that creates beat's schedule, which is not saved when the process ends."""

    def create() -> ResilientScheduler:
        scheduler = ResilientScheduler(app)
        scheduler._finalize.cancel()  # Celery's own: saves the schedule when the process ends
        return scheduler

    return create


def test_schedule_is_unchanged_while_postgres_is_away(beat, monkeypatch):
    schedule = beat()
    names = set(schedule.schedule)
    assert "mirrors" in names
    connection.close()
    with monkeypatch.context() as away:
        away.setitem(connection.settings_dict, "PORT", "1")
        schedule._last_full_sync -= timedelta(minutes=6)
        assert set(schedule.schedule) == names
    PeriodicTask.objects.filter(name="mirrors").update(enabled=False)
    schedule._last_full_sync -= timedelta(minutes=6)
    assert set(schedule.schedule) == names - {"mirrors"}, "the schedule is read again"


def test_schedule_is_not_saved_within_a_transaction(beat):
    """Celery's handler of SIGTERM saves the schedule wherever the main thread is."""
    schedule = beat()
    schedule.reserve(schedule.schedule["mirrors"])
    with transaction.atomic():
        schedule.sync()
        assert PeriodicTask.objects.get(name="mirrors").last_run_at is None
    schedule.sync()
    assert PeriodicTask.objects.get(name="mirrors").last_run_at is not None


def test_worker_limits_its_statements(transactional_db):
    assert limit_statements in [receiver() for _, receiver in signals.worker_init.receivers]
    connection.close()
    limit_statements()
    try:
        with connection.cursor() as cursor:
            cursor.execute("SHOW statement_timeout")
            assert cursor.fetchone() == (f"{STATEMENT_SECONDS // 60}min",)
            cursor.execute("RESET statement_timeout")
    finally:
        connection_created.disconnect(dispatch_uid="limit_statements")


def test_tasks_run_on_time_after_a_fast_clock_is_corrected(beat, monkeypatch):
    """Correct the clock during one beat, and before another that reads last runs in the future."""
    hour = timedelta(hours=1)
    ran = []
    monkeypatch.setattr(
        ResilientScheduler, "apply_entry", lambda self, entry, **_: ran.append(entry.name)
    )
    schedule = beat()
    with monkeypatch.context() as clock_ahead:
        now = beat_scheduler.uptime()
        clock_ahead.setattr(beat_scheduler, "uptime", lambda: now - hour.total_seconds())
        schedule.tick()
    # A clock that is an hour ahead leaves such times in Celery's queue and in the database.
    schedule._heap = [at._replace(time=at.time + hour.total_seconds()) for at in schedule._heap]
    for entry in schedule.schedule.values():
        entry.last_run_at += hour
    PeriodicTask.objects.update(last_run_at=timezone.now() + hour)
    frequent_tasks = {"mirrors", "drain_reports", "pull_remote_telemetry", "advance_runs"}
    for scheduler in (schedule, beat()):
        ran.clear()
        deadline = time.monotonic() + 15
        while not frequent_tasks <= set(ran):
            assert time.monotonic() < deadline, frequent_tasks - set(ran)
            time.sleep(max(0.0, min(0.1, scheduler.tick())))
