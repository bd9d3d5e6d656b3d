"""Reports are spooled in order, delivered when a coordinator answers, and never stop training."""

import itertools
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from helpers import paths, wait_for
from helpers.worker.fake_coordinator import MACHINE, RUN, FakeCoordinator
from single_site import SingleSite

from barnraise.coordinator_client import reporter as report_module
from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.coordinator_client.reporter import (
    LONGEST_PAUSE,
    Reporter,
    ReportSpool,
    backoff,
    clock_warning,
)
from barnraise.errors import CoordinatorError, CoordinatorUnreachableError, StateError
from barnraise.protocol.coordinator_messages import Directive, Problem, ReportReply, Reports
from barnraise.protocol.enums import Activity, RunStatus
from barnraise.protocol.reports import NO_FIGURES, MeasuredLoss, Report
from barnraise.protocol.signing import Identity, open_signed
from barnraise.spec import RunSpec, preset
from barnraise.training.status import token_budget

GOLDEN = paths.GOLDEN / "reports.json"

FIGURES = dict(NO_FIGURES) | {"activity": Activity.TRAINING}
PLAN = Reports.model_validate_json(GOLDEN.read_text()).reports[0].plan
wait_until = partial(wait_for.wait_until, seconds=10.0)


def test_wrong_clock_is_explained():
    assert clock_warning(4.0) == clock_warning(-4.0) == ""
    ahead = clock_warning(12.0)
    assert "12 seconds ahead of the coordinator's" in ahead
    assert "If this machine's is the wrong one, peers hold its updates back" in ahead
    assert "3,600 seconds behind the coordinator's" in clock_warning(-3600.0)
    assert clock_warning(12.0, round_trip=8.0) == "" != clock_warning(-14.0, round_trip=8.0)


def report(step: int = 0, **changes) -> Report:
    return Report(seq=1, at=0, addresses=[], **FIGURES | {"step": step} | changes)


@contextmanager
def disk_full(spool: Path) -> Iterator[None]:
    """Let every write of a report into the spool fail during the block."""
    with closing(sqlite3.connect(spool)) as database:
        database.execute(
            "CREATE TRIGGER full BEFORE INSERT ON report BEGIN SELECT RAISE(ABORT, 'full'); END"
        )
        database.commit()
        yield
        database.execute("DROP TRIGGER full")
        database.commit()


# ---- the spool


def test_reports_are_numbered_in_order_and_survive_a_restart(tmp_path):
    spool = ReportSpool(tmp_path / "spool.sqlite")
    for step in range(5):
        spool.append(report(step))
    spool.drop_through(2)
    spool.close()
    second = ReportSpool(tmp_path / "spool.sqlite")
    assert [(r.seq, r.step) for r in second.read_after(0)] == [(3, 2), (4, 3), (5, 4)]
    assert [r.seq for r in second.read_after(3, limit=1)] == [4]
    second.drop_through(5)
    second.close()
    third = ReportSpool(tmp_path / "spool.sqlite")
    third.append(report(9))
    assert [r.seq for r in third.read_after(0)] == [6], (
        "a number is never used twice, although its report is deleted"
    )
    third.close()


def test_spool_skips_to_the_acknowledged_number_and_never_back(tmp_path):
    spool = ReportSpool(tmp_path / "spool.sqlite")
    spool.skip_to(40)
    spool.append(report(0))
    spool.skip_to(7)
    spool.append(report(1))
    assert [r.seq for r in spool.read_after(0)] == [41, 42] and spool.last_seq == 42
    spool.close()


def test_full_spool_drops_the_oldest_reports(tmp_path, monkeypatch):
    monkeypatch.setattr("barnraise.coordinator_client.reporter.MAX_SPOOLED", 10)
    spool = ReportSpool(tmp_path / "spool.sqlite")
    for step in range(25):
        spool.append(report(step))
    assert [r.step for r in spool.read_after(0)] == list(range(15, 25))
    spool.close()


def test_spool_after_a_failed_write_stays_usable(tmp_path):
    spool = ReportSpool(tmp_path / "spool.sqlite")
    with disk_full(tmp_path / "spool.sqlite"), pytest.raises(sqlite3.Error):
        spool.append(report(0))
    spool.append(report(1))
    assert [r.step for r in spool.read_after(0)] == [1]
    spool.close()


def test_damaged_spool_is_refused_by_name(tmp_path):
    (tmp_path / "spool.sqlite").write_bytes(b"not a database, not at all" * 100)
    with pytest.raises(StateError, match=r"spool\.sqlite cannot be used"):
        ReportSpool(tmp_path / "spool.sqlite")


def test_backoff_grows_up_to_a_bound():
    assert backoff(10.0, 0) == 10.0
    assert all(backoff(1.0, n) <= LONGEST_PAUSE * 1.2 for n in (1, 5, 100, 100_000))
    assert backoff(0.2, 1) < backoff(0.2, 4) < backoff(0.2, 8)


# ---- the reporter


@pytest.fixture
def coordinator():
    fake = FakeCoordinator()
    yield fake
    fake.close()


@pytest.fixture
def start(coordinator, tmp_path):
    """Provide a function that starts a reporter with a spool of its own, `spool0.sqlite` first."""
    started: list[Reporter] = []
    numbers = itertools.count()

    def start_reporter(clock=time.time) -> Reporter:
        identity = Identity(b"w" * 32)
        client = SingleSite(coordinator.url, identity, coordinator.identity.key, clock)
        first = Directive(
            run=RUN, machine=MACHINE, status=RunStatus.TRAINING, report_every=0.2, issued=0
        )
        reporter = Reporter(
            client, RUN, MACHINE, first, ReportSpool(tmp_path / f"spool{next(numbers)}.sqlite")
        )
        reporter.update_figures(report())
        started.append(reporter)
        reporter.start()
        return reporter

    yield start_reporter
    for reporter in started:
        reporter.stop()


def test_no_report_is_lost_while_the_coordinator_is_unreachable(coordinator, start):
    reporter = start()
    wait_until(lambda: len(coordinator.reports) >= 2)
    coordinator.close()
    before = max(coordinator.reports)
    closed_at = time.monotonic()
    for n in range(5):
        reporter.update_figures(report(n, points=[MeasuredLoss(kind="train", tokens=n, loss=1.0)]))
        time.sleep(0.3)
    intervals = (time.monotonic() - closed_at) / 0.2
    coordinator.open()
    wait_until(lambda: len(coordinator.reports) > before + intervals / 2)
    assert sorted(coordinator.reports) == list(range(1, len(coordinator.reports) + 1)), (
        "a number is missing"
    )
    assert [p.tokens for _, r in sorted(coordinator.reports.items()) for p in r.points] == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_first_loss_is_reported_at_once_and_later_ones_in_turn(coordinator, start):
    coordinator.directive["report_every"] = 3600.0
    reporter = start()
    wait_until(lambda: len(coordinator.reports) == 1 and reporter.directive.report_every == 3600)
    for tokens in (1, 2):
        points = [MeasuredLoss(kind="train", tokens=tokens, loss=1.0)]
        reporter.update_figures(report(points=points))
        wait_until(lambda: len(coordinator.reports) == 2)
    assert [point.tokens for point in coordinator.reports[2].points][:1] == [1]


def test_acknowledged_reports_are_dropped_and_no_others(coordinator, start):
    reporter = start()
    wait_until(lambda: len(coordinator.reports) >= 3)
    assert [r.seq for r in reporter.unsent_reports()][:3] == [1, 2, 3], (
        "it acknowledged nothing, so it may still lose them"
    )
    coordinator.acknowledged = 3
    wait_until(lambda: reporter.unsent_reports()[0].seq == 4)


def test_unacknowledged_reports_are_sent_again(coordinator, start, monkeypatch):
    monkeypatch.setattr("barnraise.coordinator_client.reporter.UNCONFIRMED_SECONDS", 0.5)
    start()
    wait_until(lambda: len(coordinator.reports) >= 2)
    coordinator.reports.clear()  # its queue was lost
    wait_until(lambda: {1, 2} <= set(coordinator.reports))


@pytest.mark.parametrize("status", [403, 404, 410])
def test_reporter_refused_for_good_stops_with_the_reason(coordinator, start, status):
    coordinator.failing = (status, "this machine was revoked by its owner")
    reporter = start()
    wait_until(lambda: reporter.refused == "this machine was revoked by its owner")


@pytest.mark.parametrize("status", [401, 422, 429, 500, 503])
def test_reporter_refused_for_now_goes_on(coordinator, start, status):
    coordinator.failing = (status, "not now")
    reporter = start()
    wait_until(lambda: sum("reports" in route for route in coordinator.requests) >= 2)
    coordinator.failing = None
    wait_until(lambda: len(coordinator.reports) >= 3)
    assert reporter.refused is None


def test_old_foreign_or_forged_directive_is_ignored(coordinator, start):
    coordinator.issued = 1000.0
    coordinator.directive["status"] = RunStatus.PAUSED
    reporter = start()
    wait_until(lambda: reporter.directive.status is RunStatus.PAUSED)
    coordinator.directive["status"] = RunStatus.CANCELLED
    coordinator.issued = 999.0
    seen = len(coordinator.reports)
    wait_until(lambda: len(coordinator.reports) > seen + 1)
    assert reporter.directive.status is RunStatus.PAUSED
    coordinator.directive["machine"] = RUN
    coordinator.issued = 2000.0
    seen = len(coordinator.reports)
    wait_until(lambda: len(coordinator.reports) > seen + 1)
    assert reporter.directive.status is RunStatus.PAUSED
    coordinator.directive["machine"] = MACHINE
    directive = Directive(**coordinator.directive, issued=3000.0)
    forged = Identity(b"x" * 32).sign("directive", directive)
    coordinator.signed_directive = lambda: forged
    seen = len(coordinator.reports)
    wait_until(lambda: len(coordinator.reports) > seen + 1)
    assert reporter.directive.status is RunStatus.PAUSED
    assert forged.key != coordinator.identity.key


def test_interval_of_each_answer_is_obeyed(coordinator, start):
    coordinator.directive["report_every"] = 3600.0
    reporter = start()
    wait_until(lambda: len(coordinator.reports) == 1 and reporter.directive.report_every == 3600)
    time.sleep(0.6)
    assert len(coordinator.reports) == 1, "it waits as long as the site asked it to"
    coordinator.directive["report_every"] = 0.3
    points = [MeasuredLoss(kind="train", tokens=1, loss=1.0)]
    reporter.update_figures(report(points=points))  # the first loss is reported at once
    wait_until(lambda: len(coordinator.reports) >= 4)


@pytest.mark.parametrize("nonsense", [0.0, -1.0, 1e9, float("nan"), float("inf")])
def test_interval_out_of_bounds_is_refused_and_the_last_one_stays(coordinator, start, nonsense):
    reporter = start()
    wait_until(lambda: coordinator.reports)
    valid = Directive(**coordinator.directive, issued=time.time() + 60)
    body = valid.model_copy(update={"report_every": nonsense})
    coordinator.signed_directive = lambda: coordinator.identity.sign("directive", body)
    seen = len(coordinator.reports)
    wait_until(lambda: len(coordinator.reports) > seen + 1)
    assert reporter.directive.report_every == 0.2


def test_stop_delivers_the_last_figures(coordinator, start):
    reporter = start()
    wait_until(lambda: coordinator.reports)
    reporter.update_figures(report(77, activity=Activity.LEFT))
    reporter.stop()
    assert coordinator.reports[max(coordinator.reports)].step == 77


def test_every_report_contains_the_plan_and_the_step_time(coordinator, start):
    reporter = start()
    wait_until(lambda: coordinator.reports)
    assert coordinator.reports[1].plan is None and coordinator.reports[1].step_seconds is None
    reporter.update_figures(report(plan=PLAN, step_seconds=5.1))
    seen = len(coordinator.reports)
    wait_until(lambda: len(coordinator.reports) > seen + 2)
    newest = [report for _, report in sorted(coordinator.reports.items())[-2:]]
    assert [(r.plan, r.step_seconds) for r in newest] == [(PLAN, 5.1)] * 2


def test_stop_waits_briefly_for_a_silent_coordinator(coordinator, start, monkeypatch):
    monkeypatch.setattr("barnraise.coordinator_client.reporter.GOODBYE_SECONDS", 0.5)
    coordinator.close()
    # It accepts connections and never answers.
    with socket.create_server(("127.0.0.1", coordinator.port), reuse_port=True):
        reporter = start()
        time.sleep(0.2)
        started_at = time.monotonic()
        reporter.stop()
        assert time.monotonic() - started_at < 15


def test_full_disk_costs_reports_and_not_the_thread(coordinator, start, tmp_path):
    start()
    wait_until(lambda: coordinator.reports)
    with disk_full(tmp_path / "spool0.sqlite"):
        time.sleep(0.6)
    seen = len(coordinator.reports)
    wait_until(lambda: len(coordinator.reports) > seen + 1)


def test_reporter_never_started_can_be_stopped(coordinator, tmp_path):
    first = Directive(run=RUN, machine=MACHINE, status=RunStatus.TRAINING, issued=0)
    client = SingleSite(coordinator.url, Identity(b"w" * 32))
    Reporter(client, RUN, MACHINE, first, ReportSpool(tmp_path / "spool.sqlite")).stop()


# ---- the client


def test_client_ignores_the_time_of_another_mirror(coordinator):
    other_mirror = "b" * 64
    client = CoordinatorClient(coordinator.url, Identity(b"w" * 32), other_mirror)
    with pytest.raises(CoordinatorError) as caught:
        client.fetch_run("x")
    assert caught.value.status == 401 and abs(client.now() - time.time()) < 1


@pytest.mark.parametrize(
    "answer", [(200, b"<html>log in to the hotel's wifi</html>"), (200, b"{}"), (403, b"go away")]
)
def test_answer_of_something_else_counts_as_unreachable(coordinator, answer):
    coordinator.routes["GET /runs/x"] = lambda body: answer
    with pytest.raises(CoordinatorUnreachableError, match="something that is not Barnraise's API"):
        CoordinatorClient(coordinator.url, Identity(b"w" * 32), coordinator.identity.key).fetch_run(
            "x"
        )


def test_endless_answer_is_cut_off(coordinator):
    coordinator.routes["GET /runs/x"] = lambda body: (200, b" " * (3 << 20))
    with pytest.raises(CoordinatorUnreachableError, match="was cut off"):
        CoordinatorClient(coordinator.url, Identity(b"w" * 32), coordinator.identity.key).fetch_run(
            "x"
        )


def test_token_budget_of_a_directive_only_exceeds_the_specs():
    spec = RunSpec(model=preset("gpt-nano"))
    initial = spec.recipe.token_budget
    for extended, expected in ((None, initial), (initial + 5, initial + 5), (1, initial)):
        directive = Directive(
            run=RUN, machine=MACHINE, status=RunStatus.TRAINING, token_budget=extended, issued=0
        )
        assert token_budget(spec, directive) == expected


def test_directive_is_polled_between_rare_reports(coordinator, start, monkeypatch):
    assert report_module.DIRECTIVE_SECONDS <= 30, (
        "a revocation reaches every peer within a minute, directly or through other peers"
    )
    monkeypatch.setattr(report_module, "DIRECTIVE_SECONDS", 0.2)
    coordinator.directive["report_every"] = 3600.0
    coordinator.routes[f"GET /runs/{RUN}/directive"] = lambda body: ReportReply(
        acknowledged=0, directive=coordinator.signed_directive()
    )
    reporter = start()
    wait_until(lambda: len(coordinator.reports) == 1 and reporter.directive.report_every == 3600)
    coordinator.directive["revoked"] = ["a" * 64]
    wait_until(lambda: reporter.directive.revoked == ["a" * 64])
    assert len(coordinator.reports) == 1
    assert open_signed(reporter.signed_directive, "directive", Directive).revoked
    coordinator.routes[f"GET /runs/{RUN}/directive"] = lambda body: (
        403,
        Problem(error="this machine was revoked"),
    )
    wait_until(lambda: reporter.refused == "this machine was revoked")
