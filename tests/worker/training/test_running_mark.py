"""What a killed worker leaves says whether memory was the reason."""

import logging
import os

import pytest
from helpers.worker.plans import tiny_plan

from barnraise.errors import PlanError
from barnraise.formats import format_bytes
from barnraise.planning.limits import Limits
from barnraise.training import running_mark
from barnraise.training.running_mark import (
    KillCounts,
    RunningMark,
    RunningWorker,
    count_kills,
    create_within_memory,
    find_memory_kill,
)

GB = 10**9
BEFORE = KillCounts(boot="a", group=1, system=4)
WORKER = RunningWorker(process=1, host_bytes=8 * GB, is_short=False, kills=BEFORE)


@pytest.mark.parametrize(
    ("now", "killed"),
    [
        (BEFORE, False),
        (KillCounts("a", 2, 5), True),
        (KillCounts("a", 0, 5), True),  # a new container: its group's count has begun again
        (KillCounts("b", 2, 5), False),  # the system has been restarted
        (KillCounts("", 2, 5), False),
    ],
)
def test_kills_of_the_kernel_since_the_start_are_the_reason(now, killed):
    sentence = find_memory_kill(WORKER, now)
    assert bool(sentence) == killed
    assert not killed or f"memory ran out (its plan used {format_bytes(8 * GB)})" in sentence


def test_worker_that_ended_while_memory_was_short_counts():
    short = RunningWorker(process=1, host_bytes=8 * GB, is_short=True, kills=BEFORE)
    assert "while memory was short" in find_memory_kill(short, KillCounts())
    assert find_memory_kill(None, KillCounts("a", 9, 9)) == ""


def test_mark_describes_the_running_worker_until_it_ends(tmp_path):
    mark = RunningMark(tmp_path)
    assert mark.load() is None
    mark.set_shortage(True)
    assert mark.load() is None, "no worker has started"
    mark.write(5000)
    worker = RunningMark(tmp_path).load()
    assert worker == RunningWorker(os.getpid(), 5000, False, count_kills())
    mark.set_shortage(True)
    assert RunningMark(tmp_path).load().is_short
    mark.remove()
    assert mark.load() is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "[]", '{"process": 1}', '{"kills": 3}', "{}"])
def test_damaged_mark_counts_as_none(tmp_path, content):
    (tmp_path / "running.json").write_text(content)
    assert RunningMark(tmp_path).load() is None


def test_next_worker_after_a_kill_plans_smaller_and_states_it(tmp_path, caplog):
    def create(limits: Limits) -> Limits:
        return limits

    assert create_within_memory(tmp_path, Limits(), create) == Limits()
    mark = RunningMark(tmp_path)
    mark.write(tiny_plan(host_bytes=8 * GB).host_bytes)
    mark.set_shortage(True)
    with caplog.at_level(logging.WARNING):
        assert create_within_memory(tmp_path, Limits(), create).memory == int(6.8 * GB)
    assert "barnraise limits --memory 6800MB" in caplog.text
    assert create_within_memory(tmp_path, Limits(memory=GB), create).memory == GB


def test_model_without_a_smaller_plan_is_trained_as_before(tmp_path, caplog):
    mark = RunningMark(tmp_path)
    mark.write(8 * GB)
    mark.set_shortage(True)

    def create(limits: Limits) -> Limits:
        if limits.memory is not None:
            raise PlanError("this model does not fit")
        return limits

    assert create_within_memory(tmp_path, Limits(), create) == Limits()
    assert "there is no smaller plan" in caplog.text


@pytest.mark.parametrize(
    ("text", "kills"), [("pgfault 7\noom_kill 3\noom_killer 9\n", 3), ("oom_kill x\n", 0), ("", 0)]
)
def test_kernels_count_is_read_by_its_name(tmp_path, monkeypatch, text, kills):
    assert count_kills().system >= 0
    monkeypatch.setattr(running_mark, "SYSTEM_COUNTS", tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text(text)
    assert count_kills().system == kills
