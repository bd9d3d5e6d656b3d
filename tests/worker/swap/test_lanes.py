"""Tests of lanes and the events between them."""

import threading
import time

import pytest
import torch

from barnraise.swap.lanes import LaneEvent, WorkerLane


@pytest.fixture
def lane():
    lanes: list[WorkerLane] = []

    def new(**options) -> WorkerLane:
        lanes.append(WorkerLane("test", **options))
        return lanes[-1]

    yield new
    for lane in lanes:
        lane.close()


def test_lane_runs_tasks_in_order_even_if_the_first_must_wait(lane):
    done, work, gate = [], lane(), lane()
    release = threading.Event()
    opened = gate.submit(release.wait)
    work.submit(lambda: done.append(1), [opened])
    last = work.submit(lambda: done.append(2))
    time.sleep(0.05)
    assert done == []
    release.set()
    last.wait()
    assert done == [1, 2]


def test_eager_lane_runs_the_most_urgent_task_that_can_start(lane):
    done, work, gate = [], lane(eager=True), lane()
    release, start = threading.Event(), threading.Event()
    opened = gate.submit(release.wait)
    work.submit(start.wait)  # until all other tasks are queued
    work.submit(lambda: done.append("waits"), [opened], urgency=0)
    for name, urgency in (("later", 3), ("sooner", 1), ("middle", 2)):
        last = work.submit(lambda name=name: done.append(name), urgency=urgency)
    start.set()
    last.wait()
    while len(done) < 3:
        time.sleep(0.001)
    release.set()
    work.wait_until_idle()
    assert done == ["sooner", "middle", "later", "waits"]


class IssuedCopy:
    """A stream's event that is passed when the test says so."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.passed.wait()


def test_eager_lane_does_not_wait_for_a_copy_that_is_only_issued(lane):
    """The thread that launches is far ahead: a copy is issued long before its stream gets there."""
    done, work, start, copy = [], lane(eager=True), threading.Event(), IssuedCopy()
    issued = LaneEvent()
    issued.complete(copy)
    work.submit(start.wait)
    work.submit(lambda: done.append("copied"), [issued], urgency=0)
    here = work.submit(lambda: done.append("here"), urgency=1)
    start.set()
    here.wait()
    copy.passed.set()
    work.wait_until_idle()
    assert done == ["here", "copied"]


def test_lane_failure_reaches_dependents_and_the_lane_continues(lane):
    work, other = lane(), lane()

    def fail() -> None:
        raise OSError(5, "Input/output error")

    failed = work.submit(fail)
    depends = other.submit(lambda: None, [failed])
    fine = work.submit(lambda: None)
    for event in (failed, depends):
        with pytest.raises(OSError, match="Input/output"):
            event.wait()
    fine.wait()


def test_inline_lane_runs_in_the_callers_thread_and_raises_at_once(lane):
    work, seen = lane(inline=True), []
    work.submit(lambda: seen.append(threading.current_thread())).wait()
    assert seen == [threading.current_thread()]
    with pytest.raises(ZeroDivisionError):
        work.submit(lambda: 1 / 0)


def test_wait_until_idle_waits_for_all_submitted_tasks(lane):
    work, done = lane(), []
    for n in range(5):
        work.submit(lambda n=n: (time.sleep(0.01), done.append(n)))
    work.wait_until_idle()
    assert done == [0, 1, 2, 3, 4]


def test_lane_has_its_own_number_of_torch_threads(lane):
    before = torch.get_num_threads()
    seen: list[int] = []
    lane(threads=1).submit(lambda: seen.append(torch.get_num_threads())).wait()
    torch.set_num_threads(before)
    assert seen == [1] and torch.get_num_threads() == before
