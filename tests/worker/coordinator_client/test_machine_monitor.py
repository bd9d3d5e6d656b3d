"""What a machine reports of itself for its owner: load, limits and lines of its log."""

import logging
from pathlib import Path

import pytest

from barnraise.coordinator_client.machine_monitor import (
    QUEUED_LINES,
    GpuSensor,
    MachineMonitor,
    OwnersLogHandler,
    shorten_line,
)
from barnraise.planning.limits import Limits
from barnraise.protocol.reports import MAX_LOG_LINES, MAX_LOG_TEXT
from barnraise.training.status import describe_limits


def test_measured_system_has_memory_and_shares_between_0_and_1():
    system = MachineMonitor().measure_system()
    assert 0 < system.memory_used <= system.memory_total
    assert system.gpu is None
    for share in (system.cpu, system.worker_cpu):
        assert share is not None and 0 <= share <= 1


def test_gpu_that_the_driver_does_not_have_measures_nothing():
    assert GpuSensor(97).measure() == {}
    assert MachineMonitor(gpu_index=97).measure_system().gpu_memory_total is None


def test_limits_are_reported_as_the_owner_set_them():
    limits = describe_limits(Limits(memory=8 << 30, uplink=625_000))
    assert (limits.memory, limits.uplink, limits.disk) == (8 << 30, 625_000, None)


@pytest.fixture
def monitored_log():
    """Provide a logger whose lines a monitor queues, and that monitor."""
    monitor = MachineMonitor()
    handler = OwnersLogHandler(monitor)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger, monitor


def test_log_lines_come_in_order_each_once_and_a_few_at_a_time(monitored_log):
    logger, monitor = monitored_log
    logger.debug("not for owners")
    for number in range(MAX_LOG_LINES + 2):
        logger.warning("line %d", number)
    first, second = monitor.pop_lines(), monitor.pop_lines()
    assert [line.text for line in first + second] == [f"line {n}" for n in range(MAX_LOG_LINES + 2)]
    assert {line.level for line in first} == {"warning"} and not monitor.pop_lines()


def test_log_of_a_machine_that_cannot_report_is_bounded(monitored_log):
    logger, monitor = monitored_log
    for number in range(3 * QUEUED_LINES):
        logger.info("line %d", number)
    lines = []
    while popped := monitor.pop_lines():
        lines += popped
    assert [line.text for line in lines][-1] == f"line {3 * QUEUED_LINES - 1}"
    assert len(lines) == QUEUED_LINES


def test_line_has_no_secret_home_folder_or_control_character():
    token = "hf_" + "a" * 30
    line = shorten_line(
        f"reads {Path.home()}/model with {token}\n\x1b[31mnow\N{RIGHT-TO-LEFT MARK}"
    )
    assert "hf_…" in line and token not in line
    assert line.startswith("reads ~/model") and line.isprintable()
    assert len(shorten_line("x" * 999)) == MAX_LOG_TEXT


def test_line_of_a_user_whose_home_is_the_root_stays_as_it_is(monkeypatch):
    monkeypatch.setenv("HOME", "/")
    assert shorten_line("reads /data/a.txt at 3 tokens/s") == "reads /data/a.txt at 3 tokens/s"
