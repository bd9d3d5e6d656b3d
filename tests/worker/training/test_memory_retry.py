"""A worker whose memory runs out trains on with smaller plans, a few times."""

import logging

import pytest
from helpers.worker.plans import tiny_plan

from barnraise.errors import MemoryShortageError
from barnraise.planning.budgets import device_limit
from barnraise.planning.limits import Limits
from barnraise.planning.memory_pressure import ATTEMPTS, CALM_SECONDS
from barnraise.training.memory_retry import run_within_memory
from barnraise.training.memory_watch import MemoryWatch

GB = 10**9


class ShortOfMemory:
    """A worker that runs out of memory after so many seconds, each time, before one trains.

    Its plans use all of their limit.
    """

    def __init__(self, failures: list[float], device: bool) -> None:
        self.failures, self.device = failures, device
        self.now = 0.0
        self.limits = []
        self.watch = MemoryWatch(clock=lambda: self.now)

    def create(self, limits: Limits):
        """Return the worker under new limits."""
        self.limits.append(limits)
        used = 5 * GB if limits.device_memory is None else limits.device_memory - device_limit(0)
        self.plan = tiny_plan(device_bytes=used, host_bytes=limits.memory or 2000)
        return self

    def run(self) -> None:
        """Train, or run out of memory."""
        if self.failures:
            self.now += self.failures.pop(0)
            raise MemoryShortageError("there is too little of it", self.device)

    def train(self, limits: Limits):
        """Train within memory."""
        return run_within_memory(self.create, limits, self.watch, lambda: self.now)


def test_shortage_of_gpu_memory_costs_a_few_per_cent_of_the_plan(caplog):
    worker = ShortOfMemory([1.0], device=True)
    with caplog.at_level(logging.WARNING):
        assert worker.train(Limits(memory=5000)) is worker
    first, second = worker.limits
    assert first == Limits(memory=5000) and second.memory == 5000
    assert second.device_memory == device_limit(4_700_000_000)
    assert (
        "there is too little of it" in caplog.text
        and "limits --device-memory 5713MB" in caplog.text
    )
    assert worker.watch.pressure.shortages == 1


def test_each_attempt_uses_less_and_the_last_shortage_ends_the_worker():
    worker = ShortOfMemory([1.0] * (ATTEMPTS + 1), device=False)
    with pytest.raises(MemoryShortageError):
        worker.train(Limits(memory=10_000))
    used = [limits.memory for limits in worker.limits]
    assert used == [10_000, 9_400, 8_836, 8_305]


def test_attempts_count_anew_after_an_hour_of_training():
    worker = ShortOfMemory([1.0, 1.0, CALM_SECONDS, 1.0, 1.0], device=True)
    assert worker.train(Limits()) is worker
    assert worker.watch.pressure.shortages == 5


def test_worker_that_has_to_leave_does_not_run():
    assert run_within_memory(lambda limits: None, Limits(), MemoryWatch()) is None
