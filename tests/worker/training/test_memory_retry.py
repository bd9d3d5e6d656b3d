"""A worker whose memory runs out trains on with a smaller plan, once."""

import logging

import pytest
from helpers.worker.plans import tiny_plan

from barnraise.errors import MemoryShortageError
from barnraise.planning.limits import Limits
from barnraise.training.memory_retry import run_within_memory


class ShortOfMemory:
    """A worker that runs out of memory so many times before one trains."""

    def __init__(self, failures: int, device: bool) -> None:
        self.failures, self.device = failures, device
        self.limits = []

    def create(self, limits: Limits):
        """Return the worker under new limits."""
        self.limits.append(limits)
        self.plan = tiny_plan(device_bytes=1000, host_bytes=2000)
        return self

    def run(self) -> None:
        """Train, or run out of memory."""
        self.failures -= 1
        if self.failures >= 0:
            raise MemoryShortageError("there is too little of it", self.device)


def test_first_shortage_of_gpu_memory_leads_to_a_smaller_plan(caplog):
    worker = ShortOfMemory(1, device=True)
    with caplog.at_level(logging.WARNING):
        assert run_within_memory(worker.create, Limits(memory=5000)) is worker
    assert worker.limits == [Limits(memory=5000), Limits(memory=5000, device_memory=850)]
    assert "there is too little of it" in caplog.text and "--device-memory" in caplog.text


def test_second_shortage_ends_the_worker():
    worker = ShortOfMemory(2, device=False)
    with pytest.raises(MemoryShortageError):
        run_within_memory(worker.create, Limits())
    assert worker.limits == [Limits(), Limits(memory=1700)]


def test_worker_that_has_to_leave_does_not_run():
    assert run_within_memory(lambda limits: None, Limits()) is None
