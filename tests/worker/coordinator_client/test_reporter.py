"""Reports: kept in order on disk, delivered when somebody answers, and never in training's way."""

import itertools
import socket
import sqlite3
import time
from functools import partial

import pytest
from helpers import paths, wait_for
from helpers.fake_coordinator import MACHINE, RUN
from helpers.fake_coordinator import FakeCoordinator as Small

from barnraise.coordinator_client import reporter as report_module
from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.coordinator_client.reporter import (
    LONGEST_PAUSE,
    Reporter,
    ReportSpool,
    WorkerFigures,
    backoff,
)
from barnraise.errors import CoordinatorError, CoordinatorUnreachableError, StateError
from barnraise.protocol.coordinator_messages import Directive, Problem, ReportReply, Reports
from barnraise.protocol.enums import Activity, RunStatus
from barnraise.protocol.reports import MeasuredLoss, Report  # fmt: skip
from barnraise.protocol.signing import Identity, open_signed
from barnraise.spec import RunSpec, preset
from barnraise.training.status import token_budget

GOLDEN = paths.GOLDEN / "reports.json"

NUMBERS = WorkerFigures(activity=Activity.TRAINING)
PLAN = Reports.model_validate_json(GOLDEN.read_text()).reports[0].plan
waits_for = partial(wait_for.wait_until, seconds=10.0)


def report(step: int) -> Report:
    return Report(
        seq=1, at=0, version="1", activity=Activity.TRAINING, incarnation="0" * 16, addresses=[], step=step, tokens=0,
        ledger_tokens=0, rate=0, updates_sent=0, updates_received=0, peers=0, peer_bytes_sent=0, peer_bytes_received=0,
        vector="0" * 64,
    )  # fmt: skip


# ---- the spool


def test_reports_are_numbered_in_order_and_survive_a_restart(tmp_path):
    spool = ReportSpool(tmp_path / "spool.sqlite")
    for step in range(5):
        spool.append(report(step))
    spool.drop_through(2)
    spool.close()
    again = ReportSpool(tmp_path / "spool.sqlite")
    assert [(r.seq, r.step) for r in again.read_after(0)] == [(3, 2), (4, 3), (5, 4)]
    assert [r.seq for r in again.read_after(3, limit=1)] == [4]
    again.drop_through(5)
    again.close()
    third = ReportSpool(tmp_path / "spool.sqlite")
    third.append(report(9))
    assert [r.seq for r in third.read_after(0)] == [6], (
        "a number is never given twice, though its report is gone"
    )
    third.close()


def test_numbers_go_on_past_the_coordinators_mark_and_never_back(tmp_path):
    spool = ReportSpool(tmp_path / "spool.sqlite")
    spool.skip_to(40)
    spool.append(report(0))
    spool.skip_to(7)
    spool.append(report(1))
    assert [r.seq for r in spool.read_after(0)] == [41, 42] and spool.last_seq == 42
    spool.close()


def test_the_oldest_reports_give_way_when_nobody_answers_for_days(tmp_path, monkeypatch):
    monkeypatch.setattr("barnraise.coordinator_client.reporter.MAX_SPOOLED", 10)
    spool = ReportSpool(tmp_path / "spool.sqlite")
    for step in range(25):
        spool.append(report(step))
    assert [r.step for r in spool.read_after(0)] == list(range(15, 25)) and len(spool) == 10
    spool.close()


def test_a_report_the_disk_refuses_leaves_the_spool_usable(tmp_path):
    spool = ReportSpool(tmp_path / "spool.sqlite")
    spool._db.execute(
        "CREATE TRIGGER full BEFORE INSERT ON report BEGIN SELECT RAISE(ABORT, 'full'); END"
    )
    with pytest.raises(sqlite3.Error):
        spool.append(report(0))
    spool._db.execute("DROP TRIGGER full")
    spool.append(report(1))
    assert [r.step for r in spool.read_after(0)] == [1]
    spool.close()


def test_a_damaged_spool_is_refused_by_name(tmp_path):
    (tmp_path / "spool.sqlite").write_bytes(b"not a database, not at all" * 100)
    with pytest.raises(StateError, match=r"spool\.sqlite cannot be used"):
        ReportSpool(tmp_path / "spool.sqlite")


def test_tries_grow_rarer_up_to_a_bound_however_long_nobody_answers():
    assert backoff(10.0, 0) == 10.0
    assert all(backoff(1.0, n) <= LONGEST_PAUSE * 1.2 for n in (1, 5, 100, 100_000))
    assert backoff(0.2, 1) < backoff(0.2, 4) < backoff(0.2, 8)


# ---- the reporter


@pytest.fixture
def small():
    made = Small()
    yield made
    made.close()


@pytest.fixture
def start(small, tmp_path):
    started, numbers = [], itertools.count()

    def begin(clock=time.time) -> Reporter:
        identity = Identity(b"w" * 32)
        client = CoordinatorClient(small.url, identity, small.identity.key, clock)
        first = Directive(
            run=RUN, machine=MACHINE, status=RunStatus.TRAINING, report_every=0.2, issued=0
        )
        reporter = Reporter(
            client, RUN, MACHINE, first, ReportSpool(tmp_path / f"spool{next(numbers)}.sqlite")
        )
        reporter.update_figures(NUMBERS)
        started.append(reporter)
        reporter.start()
        return reporter

    yield begin
    for reporter in started:
        reporter.stop()


def test_no_report_is_lost_while_the_coordinator_is_unreachable(small, start):
    reporter = start()
    waits_for(lambda: len(small.reports) >= 2)
    small.close()
    before = max(small.reports)
    gone = time.monotonic()
    for n in range(5):
        reporter.update_figures(
            WorkerFigures(
                activity=Activity.TRAINING,
                step=n,
                points=(MeasuredLoss(kind="train", tokens=n, loss=1.0),),
            )
        )
        time.sleep(0.3)
    intervals = (time.monotonic() - gone) / 0.2
    small.open()
    waits_for(lambda: len(small.reports) > before + intervals / 2)
    assert sorted(small.reports) == list(range(1, len(small.reports) + 1)), "a number is missing"
    assert [p.tokens for _, r in sorted(small.reports.items()) for p in r.points] == [0, 1, 2, 3, 4]


def test_what_the_coordinator_holds_is_dropped_and_nothing_else(small, start):
    reporter = start()
    waits_for(lambda: len(small.reports) >= 3)
    assert [r.seq for r in reporter.unsent_reports()][:3] == [1, 2, 3], (
        "its mark is 0: it may lose them yet"
    )
    small.mark = 3
    waits_for(lambda: reporter.unsent_reports()[0].seq == 4)


def test_what_stays_unconfirmed_is_posted_again(small, start, monkeypatch):
    monkeypatch.setattr("barnraise.coordinator_client.reporter.UNCONFIRMED_SECONDS", 0.5)
    start()
    waits_for(lambda: len(small.reports) >= 2)
    small.reports.clear()  # its queue was lost
    waits_for(lambda: {1, 2} <= set(small.reports))


@pytest.mark.parametrize("status", [403, 404, 410])
def test_reply_that_excludes_the_machine_ends_it_with_the_reason(small, start, status):
    small.failing = (status, "this machine was revoked by its owner")
    reporter = start()
    waits_for(lambda: reporter.refused == "this machine was revoked by its owner")


@pytest.mark.parametrize("status", [401, 422, 429, 500, 503])
def test_an_answer_that_may_change_does_not_end_it(small, start, status):
    small.failing = (status, "not now")
    reporter = start()
    waits_for(lambda: sum("reports" in route for route in small.asked) >= 2)
    small.failing = None
    waits_for(lambda: len(small.reports) >= 3)
    assert reporter.refused is None


def test_an_older_directive_a_strangers_and_another_machines_are_ignored(small, start):
    small.issued = 1000.0
    small.directive["status"] = RunStatus.PAUSED
    reporter = start()
    waits_for(lambda: reporter.directive.status is RunStatus.PAUSED)
    small.directive["status"], small.issued = RunStatus.CANCELLED, 999.0
    seen = len(small.reports)
    waits_for(lambda: len(small.reports) > seen + 2)
    assert reporter.directive.status is RunStatus.PAUSED
    small.directive["machine"], small.issued = RUN, 2000.0
    seen = len(small.reports)
    waits_for(lambda: len(small.reports) > seen + 2)
    assert reporter.directive.status is RunStatus.PAUSED
    mine, small.directive["machine"], small.signed_directive = (
        small.identity,
        MACHINE,
        lambda: forged,
    )
    forged = Identity(b"x" * 32).sign("directive", Directive(**small.directive, issued=3000.0))
    seen = len(small.reports)
    waits_for(lambda: len(small.reports) > seen + 2)
    assert reporter.directive.status is RunStatus.PAUSED and mine.key == small.identity.key


def test_the_last_numbers_are_delivered_on_the_way_out(small, start):
    reporter = start()
    waits_for(lambda: small.reports)
    reporter.update_figures(WorkerFigures(activity=Activity.LEFT, step=77))
    reporter.stop()
    assert small.reports[max(small.reports)].step == 77


def test_every_report_carries_the_plan_and_the_measured_step(small, start):
    reporter = start()
    waits_for(lambda: small.reports)
    assert small.reports[1].plan is None and small.reports[1].step_seconds is None
    reporter.update_figures(WorkerFigures(activity=Activity.TRAINING, plan=PLAN, step_seconds=5.1))
    seen = len(small.reports)
    waits_for(lambda: len(small.reports) > seen + 2)
    newest = [report for _, report in sorted(small.reports.items())[-2:]]
    assert [(r.plan, r.step_seconds) for r in newest] == [(PLAN, 5.1)] * 2


def test_a_coordinator_that_never_answers_does_not_hold_a_leaving_worker(small, start, monkeypatch):
    monkeypatch.setattr("barnraise.coordinator_client.reporter.GOODBYE_SECONDS", 0.5)
    small.close()
    with socket.create_server(("127.0.0.1", small.port)):  # takes connections and says nothing
        reporter = start()
        time.sleep(0.2)
        began = time.monotonic()
        reporter.stop()
        assert time.monotonic() - began < 3


def test_a_full_disk_costs_reports_and_not_the_thread(small, start):
    reporter = start()
    waits_for(lambda: small.reports)
    other = sqlite3.connect(reporter._spool._db.execute("PRAGMA database_list").fetchone()[2])
    other.execute(
        "CREATE TRIGGER full BEFORE INSERT ON report BEGIN SELECT RAISE(ABORT, 'full'); END"
    )
    other.commit()
    time.sleep(0.6)
    other.execute("DROP TRIGGER full")
    other.commit()
    other.close()
    seen = len(small.reports)
    waits_for(lambda: len(small.reports) > seen + 1)


def test_a_reporter_that_was_never_started_can_be_stopped(small, tmp_path):
    first = Directive(run=RUN, machine=MACHINE, status=RunStatus.TRAINING, issued=0)
    Reporter(
        CoordinatorClient(small.url, Identity(b"w" * 32)),
        RUN,
        MACHINE,
        first,
        ReportSpool(tmp_path / "s.sqlite"),
    ).stop()


# ---- the client


@pytest.mark.parametrize("wrong", [-90_000.0, 3 * 365 * 86400.0])
def test_a_machine_with_a_wrong_clock_signs_with_the_servers_time(small, start, wrong):
    reporter = start(clock=lambda: time.time() + wrong)
    waits_for(lambda: len(small.reports) >= 2)
    assert abs(small.reports[2].at - time.time()) < 5
    assert not reporter.is_orphaned and reporter.refused is None


def test_another_mirrors_time_is_not_believed(small):
    client = CoordinatorClient(
        small.url, Identity(b"w" * 32), "b" * 64
    )  # asks for somebody else at this address
    with pytest.raises(CoordinatorError) as caught:
        client.fetch_run("x")
    assert caught.value.status == 401 and abs(client.now() - time.time()) < 1


@pytest.mark.parametrize(
    "answer", [(200, b"<html>log in to the hotel's wifi</html>"), (200, b"{}"), (403, b"go away")]
)
def test_an_answer_that_is_not_the_apis_is_nobodys(small, answer):
    small.routes["GET /runs/x"] = lambda body: answer
    with pytest.raises(CoordinatorUnreachableError, match="something that is not Barnraise's API"):
        CoordinatorClient(small.url, Identity(b"w" * 32), small.identity.key).fetch_run("x")


def test_an_answer_without_end_is_cut_off(small):
    small.routes["GET /runs/x"] = lambda body: (200, b" " * (3 << 20))
    with pytest.raises(CoordinatorUnreachableError, match="was cut off"):
        CoordinatorClient(small.url, Identity(b"w" * 32), small.identity.key).fetch_run("x")


def test_a_budget_only_grows_past_the_specs():
    spec = RunSpec(model=preset("gpt-nano"))
    own = spec.recipe.token_budget
    for told, expected in ((None, own), (own + 5, own + 5), (1, own)):
        said = Directive(
            run=RUN, machine=MACHINE, status=RunStatus.TRAINING, token_budget=told, issued=0
        )
        assert token_budget(spec, said) == expected


def test_directive_is_polled_between_rare_reports(small, start, monkeypatch):
    assert report_module.DIRECTIVE_SECONDS <= 30, (
        "a revocation is known within a minute, peers' telling each other included"
    )
    monkeypatch.setattr(report_module, "DIRECTIVE_SECONDS", 0.2)
    small.directive["report_every"] = 3600.0
    small.routes[f"GET /runs/{RUN}/directive"] = lambda body: ReportReply(
        acknowledged=0, directive=small.signed_directive()
    )
    reporter = start()
    waits_for(lambda: len(small.reports) == 1 and reporter.directive.report_every == 3600)
    small.directive["revoked"] = ["a" * 64]
    waits_for(lambda: reporter.directive.revoked == ["a" * 64])
    assert (
        len(small.reports) == 1
        and open_signed(reporter.signed_directive, "directive", Directive).revoked
    )
    small.routes[f"GET /runs/{RUN}/directive"] = lambda body: (
        403,
        Problem(error="this machine was revoked"),
    )
    waits_for(lambda: reporter.refused == "this machine was revoked")
