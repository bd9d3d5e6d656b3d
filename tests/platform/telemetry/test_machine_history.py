"""What a machine reports for its owner alone: history, condition, log; and who may see it."""

import time
from datetime import timedelta

import pytest
from django.utils import timezone
from helpers.site.pages import open_client

from barnraise.protocol.reports import LimitsView, LogLine, SystemView
from coordinator.accounts.deletion import delete_account
from coordinator.fleet.models import Membership
from coordinator.telemetry import machine_history, retention
from coordinator.telemetry.machine_history import MachineCondition, SystemReading
from coordinator.telemetry.rollup import drain_queue

pytestmark = pytest.mark.django_db


def log_line(number: int) -> LogLine:
    return LogLine(at=time.time(), level="warning", text=f"line {number}")


@pytest.fixture
def reported_machine(adas_run, numbered_report):
    """Return a volunteer's machine that has sent reports with its load, limits and log lines."""
    run, ada = adas_run
    for seq in range(1, 13):
        system = SystemView(cpu=0.5, memory_used=seq, memory_total=100, cpu_celsius=60 + seq)
        log = [log_line(5 * seq + n) for n in range(5)]
        report = numbered_report(
            seq, system=system, limits=LimitsView(memory=8 << 30), log=log, rate=100.0
        )
        assert ada.report(run, report).status_code == 200
    drain_queue()
    return ada.machine


def test_condition_holds_the_newest_figures_and_lines(reported_machine):
    condition = machine_history.find_condition(reported_machine)
    assert condition
    system, limits = machine_history.parse_condition(condition)
    assert system and limits
    assert (system.cpu_celsius, limits.memory) == (72, 8 << 30)
    assert len(condition.lines) == machine_history.MAX_LINES
    assert condition.lines[-1]["text"] == "line 64" and condition.version == "0.1"
    assert machine_history.parse_condition(None) == (None, None)


def test_late_report_adds_its_lines_and_nothing_else(reported_machine, numbered_report):
    member = Membership.objects.get(machine=reported_machine)
    before = machine_history.find_condition(reported_machine)
    assert before
    older = LogLine(at=before.lines[-1]["at"] - 0.001, level="warning", text="older")
    report = numbered_report(
        13, system=SystemView(cpu_celsius=40), limits=LimitsView(), log=[older], version="0.0"
    )
    hour_ago = time.time() - 3600
    machine_history.record_readings([(member, [(report, hour_ago)])])
    after = machine_history.find_condition(reported_machine)
    assert after and (after.at, after.version) == (before.at, before.version)
    assert machine_history.parse_condition(after) == machine_history.parse_condition(before)
    texts = [line["text"] for line in after.lines]
    assert texts.index("older") < texts.index("line 64") == len(texts) - 1
    assert len(texts) == machine_history.MAX_LINES


def test_machine_that_reports_for_two_runs_in_one_batch_keeps_both_logs(
    reported_machine, numbered_report
):
    member = Membership.objects.get(machine=reported_machine)
    now = time.time()
    older, newer = (
        numbered_report(13, version=version, log=[LogLine(at=at, level="warning", text=version)])
        for version, at in (("older", now + 1), ("newer", now + 2))
    )
    machine_history.record_readings([(member, [(newer, now + 2)]), (member, [(older, now + 1)])])
    condition = machine_history.find_condition(reported_machine)
    assert condition and condition.version == "newer"
    assert [line["text"] for line in condition.lines[-2:]] == ["older", "newer"]


def test_page_of_a_silent_machine_says_when_it_last_reported(reported_machine):
    plan = {"predicted_seconds": 2.0, "sentence": "All in RAM."}
    memberships = Membership.objects.filter(machine=reported_machine)
    memberships.update(figures={"plan": plan, "step_seconds": 8.0})
    client = open_client(reported_machine.owner)
    path = f"/machines/{reported_machine.pk}/"
    page = client.get(path).content.decode()
    assert "Steps take 4.0 times as long as planned: " in page and "All in RAM." in page
    memberships.update(last_seen=timezone.now() - timedelta(days=3))
    page = client.get(path).content.decode()
    assert "last reported, 3\xa0days ago, its steps took 4.0 times as long as planned." in page


def test_history_has_one_reading_a_minute_and_the_machines_speed(reported_machine):
    history = machine_history.load_machine_history(reported_machine)
    series = history["series"]
    assert 1 <= len(series["cpu"]) <= 2, "the reports are of one minute, or of two"
    assert series["memory_used"][-1][1] == 12 and "gpu" not in series
    assert series["rate"][-1][1] == 100.0
    assert history["since"] < series["cpu"][0][0] <= history["until"]
    later = machine_history.load_machine_history(reported_machine, time.time() + 2 * 86_400)
    assert not any(later["series"].values())


def test_old_readings_are_deleted(reported_machine):
    retention.delete_old_rows(time.time())
    assert SystemReading.objects.exists()
    retention.delete_old_rows(time.time() + machine_history.READINGS_KEPT + 120)
    assert not SystemReading.objects.exists()


def test_history_is_stored_by_no_cache(reported_machine):
    answer = open_client(reported_machine.owner).get(f"/machines/{reported_machine.pk}/history/")
    assert answer.json()["series"]["cpu"] and "no-store" in answer["Cache-Control"]


def test_readings_and_log_go_with_the_owners_account(reported_machine):
    delete_account(reported_machine.owner, reported_machine.owner)
    assert not SystemReading.objects.exists() and not MachineCondition.objects.exists()
