"""What a machine reports for its owner alone: history, condition, log; and who may see it."""

import time

import pytest
from django.test import Client

from barnraise.protocol.reports import LimitsView, LogLine, SystemView
from coordinator.accounts.deletion import delete_account
from coordinator.telemetry import machine_history, retention
from coordinator.telemetry.machine_history import MachineCondition, SystemReading
from coordinator.telemetry.rollup import drain_queue

pytestmark = pytest.mark.django_db


def log_line(number: int) -> LogLine:
    return LogLine(at=time.time(), level="warning", text=f"line {number}")


@pytest.fixture
def reported_machine(person, launched_run, numbered_report):
    """Return a volunteer's machine that has sent reports with its load, limits and log lines."""
    run, ada = launched_run(person())
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


def test_only_the_owner_sees_history_and_log(reported_machine, person):
    path = f"/machines/{reported_machine.pk}/"
    owner, other = Client(), Client()
    owner.force_login(reported_machine.owner)
    other.force_login(person("eve@example.org"))
    answer = owner.get(f"{path}history/")
    assert answer.json()["series"]["cpu"] and "no-store" in answer["Cache-Control"]
    assert "line 64" in owner.get(path).content.decode()
    assert other.get(f"{path}history/").status_code == other.get(path).status_code == 404
    assert Client().get(f"{path}history/").status_code == 302


def test_readings_and_log_go_with_the_owners_account(reported_machine):
    delete_account(reported_machine.owner, reported_machine.owner)
    assert not SystemReading.objects.exists() and not MachineCondition.objects.exists()
