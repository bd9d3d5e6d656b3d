"""Test delayed figures, logs, repeated tasks and retention."""

import io
import json
import logging
import re
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest
from celery import shared_task
from django.db import OperationalError
from django.utils import timezone
from helpers.site.metrics_page import parse_metrics
from helpers.site.stored_heartbeats import AHEAD_SECONDS, set_heartbeats

from coordinator.celery import Task, app
from coordinator.fleet.models import Membership
from coordinator.fleet.tasks import expire_memberships
from coordinator.lib import heartbeats, log_format, request_id
from coordinator.lib.embedded import embedded_servers, valkey_server
from coordinator.lib.ttl_cache import TtlCache
from coordinator.staff.dashboard import collect_dashboard
from coordinator.telemetry.history import load_history
from coordinator.telemetry.models import LossPoint, ReportReceipt, Rollup
from coordinator.telemetry.retention import DAY, delete_old_rows
from coordinator.telemetry.rollup import drain_queue

pytestmark = pytest.mark.django_db
DELAYED = "Figures are delayed since"


# ---- the background parts


def test_pages_say_since_when_figures_are_delayed(client, valkey, adas_run):
    run, _ = adas_run
    set_heartbeats(valkey)
    for path in ("/runs/", f"/runs/{run.slug}/"):
        assert DELAYED not in client.get(path).content.decode().replace("hidden><span>Figures", "")
    set_heartbeats(valkey, reports=60.0)
    since = f"{datetime.fromtimestamp(time.time() - 60, UTC):%H:%M}"
    assert f"{DELAYED} {since} UTC" in client.get("/runs/").content.decode()
    page = client.get(f"/runs/{run.slug}/").content.decode()
    notice = rf'role="status"><span>{DELAYED} <span data-delayed-since="\d+">{since} UTC'
    assert re.search(notice, page)
    live = client.get(f"/live/{run.pk}/").json()["run"]["delayed_since"]
    assert live == pytest.approx(time.time() - 60, abs=5)


def test_run_page_says_what_it_waits_for_only_while_figures_are_current(signed_in, valkey, draft):
    client, owner = signed_in()
    run = draft(owner)
    run.launch()  # it waits for its text
    page = client.get(f"/runs/{run.slug}/").content.decode()
    assert "data-waiting><span data-waiting-text>" in page
    set_heartbeats(valkey, reports=60.0)
    TtlCache.clear_all()
    page = client.get(f"/runs/{run.slug}/").content.decode()
    assert "data-waiting hidden>" in page and DELAYED in page


def test_staff_dashboard_says_that_figures_are_delayed(valkey):
    set_heartbeats(valkey)
    assert collect_dashboard()["delayed_since"] is None
    set_heartbeats(valkey, schedule=60.0)
    delayed = collect_dashboard()["delayed_since"]
    assert delayed is not None and 55 < time.time() - delayed.timestamp() < 70


def test_delay_is_known_while_valkey_is_away(state, valkey, monkeypatch):
    set_heartbeats(valkey)
    assert heartbeats.delayed_since() is None
    later = time.time() + AHEAD_SECONDS + 10
    valkey_server.stop_valkey(state)
    try:
        heartbeats.record(heartbeats.Part.REPORTS)  # logs, and does not fail
        TtlCache.clear_all()
        monkeypatch.setattr(heartbeats.time, "time", lambda: later)
        assert heartbeats.delayed_since() is not None
    finally:
        embedded_servers.start(state, durable=False)


# ---- logs


def test_access_log_has_the_request_id_of_the_client(person, launched_run):
    _, ada = launched_run(person())
    handler = logging.StreamHandler()
    lines: list[str] = []
    handler.emit = lambda record: lines.append(
        log_format.JsonFormatter().format(record)
        if log_format.RequestIdFilter().filter(record)
        else ""
    )
    access = logging.getLogger("coordinator.access")
    access.addHandler(handler)
    access.setLevel(logging.DEBUG)
    try:
        ada.client.get("/api/v1/mirror", headers={"X-Request-ID": "a-workers-own-1"})
    finally:
        access.removeHandler(handler)
        access.setLevel(logging.NOTSET)
    line = json.loads(lines[-1])
    assert line["request_id"] == "a-workers-own-1"
    assert line["path"] == "/api/v1/mirror"
    assert line["view"].endswith("get_mirror")
    assert line["status"] == 200
    assert set(line) >= {"at", "level", "logger", "text", "seconds", "method"}


@pytest.mark.parametrize(
    "path",
    [
        "/teams/invitations/SECRETTOKEN123/",
        "/nothing/SECRETTOKEN123",
        "/notifications/unsubscribe/SECRETTOKEN123/",
        "/nothing%0A2026-01-01 CRITICAL coordinator.staff: forged SECRETTOKEN123",
    ],
)
def test_visitor_forges_no_log_line_and_leaks_no_secret(client, valkey, db, path):
    handler = logging.StreamHandler(stream := io.StringIO())
    handler.setFormatter(log_format.LineFormatter("{levelname} {name}: {message}", style="{"))
    handler.addFilter(log_format.PathFilter())
    loggers = [logging.getLogger(name) for name in ("coordinator.access", "django.request")]
    for logger in loggers:
        logger.addHandler(handler)
    loggers[0].setLevel(logging.DEBUG)
    try:
        client.get(path)
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        loggers[0].setLevel(logging.NOTSET)
    lines = stream.getvalue().splitlines()
    assert lines
    for line in lines:
        assert re.match(r"[A-Z]+ (coordinator\.access: GET|django\.request: )", line), line
    assert "SECRETTOKEN" not in stream.getvalue()


def test_text_of_strangers_in_a_message_stays_on_its_line():
    formatter = log_format.LineFormatter("{levelname} {name}: {message}", style="{")
    text = "a\n2026 CRITICAL forged\r\x1b[2J\u2028b"
    record = logging.makeLogRecord({"name": "x", "msg": "odd %s", "args": (text,)})
    assert "".join(formatter.format(record).split()) == formatter.format(record).replace(" ", "")
    try:
        raise ValueError(text)
    except ValueError:
        record.exc_info = sys.exc_info()
    first, *rest = formatter.format(record).splitlines()
    assert "odd" in first and all(line.startswith("    ") for line in rest)


def test_log_writes_other_objects_as_text_and_tracebacks_whole():
    try:
        raise ValueError("ours\nof two lines")
    except ValueError:
        record = logging.getLogger("x").makeRecord(
            "x", 40, "f", 1, "odd %s", (object,), True, extra={"thing": {1, 2}}
        )
        record.exc_info = __import__("sys").exc_info()
    line = json.loads(log_format.JsonFormatter().format(record))
    assert "ValueError: ours" in line["traceback"]
    assert line["thing"]
    assert "\n" not in log_format.JsonFormatter().format(record)


# ---- tasks


@shared_task(name="test.return_request_id")
def return_request_id() -> str:
    return request_id.current()


@shared_task(name="test.raise_value_error")
def raise_value_error() -> None:
    raise ValueError("ours")


@shared_task(name="test.raise_operational_error")
def raise_operational_error() -> None:
    raise OperationalError("the database is away")


def test_every_task_has_a_time_limit_and_a_retry_policy(settings):
    app.loader.import_default_modules()
    own_tasks = {
        name: task for name, task in app.tasks.items() if not name.startswith(("celery.", "test."))
    }
    assert len(own_tasks) >= 8
    for name, task in own_tasks.items():
        assert isinstance(task, Task) and 0 < task.time_limit <= 600, name
        assert task.autoretry_for, name
    scheduled = {entry["task"]: entry for entry in settings.CELERY_BEAT_SCHEDULE.values()}
    assert set(scheduled) <= set(own_tasks)
    for name, entry in scheduled.items():
        assert entry["options"]["expires"] <= entry["schedule"] * 2, (
            f"{name} would pile up while no worker runs"
        )


def test_task_is_counted_by_outcome_and_carries_the_request_id(valkey, client):
    request_id.enter("asked-by-a-page-1")
    assert (
        return_request_id.apply(headers={"request_id": "asked-by-a-page-1"}).get()
        == "asked-by-a-page-1"
    )
    assert raise_value_error.apply().state == "FAILURE"
    samples = parse_metrics(client.get("/metrics").content.decode())
    assert samples['barnraise_tasks_total{outcome="done",task="test.return_request_id"}'] == 1
    assert samples['barnraise_tasks_total{outcome="failed",task="test.raise_value_error"}'] == 1
    assert samples['barnraise_task_seconds_count{task="test.return_request_id"}'] == 1


def test_queued_task_carries_the_request_id(valkey):
    request_id.enter("asked-by-a-page-2")
    return_request_id.delay()
    with app.connection_for_read() as broker, broker.SimpleQueue("celery") as queue:
        message = queue.get_nowait()
        message.ack()
    assert message.headers["request_id"] == "asked-by-a-page-2"


def test_task_without_database_is_retried_a_limited_number_of_times(valkey, client):
    assert raise_operational_error.apply().state == "FAILURE"
    samples = parse_metrics(client.get("/metrics").content.decode())
    attempts = sum(
        v
        for s, v in samples.items()
        if s.startswith("barnraise_tasks_total") and "test.raise_operational_error" in s
    )
    assert attempts == 1 + Task.max_retries


# ---- retention


@pytest.fixture
def member(adas_run) -> Membership:
    run, _ = adas_run
    return Membership.objects.get(run=run)


def test_finer_rollups_are_deleted_sooner_than_coarser_ones(member):
    now = time.time() // 3600 * 3600
    for days, width in [(d, w) for d in (0, 1, 10, 60) for w in (10, 60, 3600)]:
        Rollup.objects.create(
            membership=member, width=width, bucket=now - days * DAY, reports=2, rate_sum=20.0
        )
    before = load_history(member.run)["rate"]
    assert delete_old_rows(now) == 3 and delete_old_rows(now) == 0, "a second run deleted more rows"
    remaining = sorted((round((now - row.bucket) / DAY), row.width) for row in Rollup.objects.all())
    assert remaining == [
        (0, 10),
        (0, 60),
        (0, 3600),
        (1, 10),
        (1, 60),
        (1, 3600),
        (10, 60),
        (10, 3600),
        (60, 3600),
    ]
    after = load_history(member.run)["rate"]
    chart_bin_seconds = 3 * 3600  # for sixty days; where it begins depends on the hour
    assert abs(after[0][0] - before[0][0]) <= chart_bin_seconds
    assert all(rate == 10.0 for _, rate in after)


def test_old_losses_are_thinned_hourly_and_validations_stay(member):
    now = time.time()
    old = (now - 40 * DAY) // 3600 * 3600
    losses = [("train", old + n * 600) for n in range(12)] + [
        ("validation", old + n) for n in range(5)
    ]
    losses += [("train", now - n) for n in range(5)]
    LossPoint.objects.bulk_create(
        LossPoint(membership=member, seq=n, position=0, kind=kind, tokens=n, loss=1.0, at=at)
        for n, (kind, at) in enumerate(losses)
    )
    assert delete_old_rows(now) == 10 and delete_old_rows(now) == 0
    assert LossPoint.objects.filter(kind="validation").count() == 5
    assert sorted(
        LossPoint.objects.filter(kind="train", at__lt=now - DAY).values_list("at", flat=True)
    ) == [old, old + 3600]


def test_old_report_receipts_are_deleted(member):
    ReportReceipt.objects.create(
        membership=member, seq=5, received=timezone.now() - timedelta(days=8)
    )
    ReportReceipt.objects.create(membership=member, seq=6)
    assert delete_old_rows() == 1 and ReportReceipt.objects.get().seq == 6


def test_machine_silent_for_a_day_has_left_the_run(member, numbered_report, strangers):
    run = member.run
    machines = strangers(run, 2, 3, 4)
    for machine, hours in zip(machines, (0, 2, 25), strict=True):
        seen = timezone.now() - timedelta(hours=hours)
        Membership.objects.filter(machine=machine.machine).update(last_seen=seen)
    assert expire_memberships() == 3 and expire_memberships() == 0
    memberships = [Membership.objects.get(machine=machine.machine) for machine in machines]
    assert [bool(membership.addresses) for membership in memberships] == [True, False, False]
    assert [membership.activity for membership in memberships] == ["joining", "joining", "left"]
    machines[2].report(run, numbered_report(1))
    drain_queue()
    memberships[2].refresh_from_db()
    assert memberships[2].activity == "training" and memberships[2].is_alive, (
        "the machine did not return"
    )
