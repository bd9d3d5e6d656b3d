"""Test how the executor runs programs, and what it does when one of their operations fails."""

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from helpers.worker.plans import RECIPE, tiny_plan

from barnraise.errors import MemoryShortageError, StateError
from barnraise.planning.program import LaneName, Operation, OperationKind, Program
from barnraise.swap.executor import (
    EngineProgress,
    Executor,
    PendingUpdate,
    naming_failures,
    sum_of_updates,
)
from barnraise.swap.state_store import StateStore

READ = Operation(OperationKind.READ, LaneName.READ, (1,), changes=(("slot", 0),))
LOAD = Operation(OperationKind.LOAD, LaneName.IN, (1,), uses=(("slot", 0),))
FORWARD = Operation(OperationKind.FORWARD, LaneName.COMPUTE, (1,))
WRITE = Operation(OperationKind.WRITE, LaneName.WRITE, (2,))
SECONDS = 10.0  # a lane that waits longer for another one would wait forever


@pytest.fixture
def executor(tmp_path) -> Iterator[Executor]:
    """Provide an executor of a tiny model on disk."""
    plan = tiny_plan("exact")
    store = StateStore(plan, tmp_path)
    executor = Executor(plan, RECIPE, store, lambda update: "{}")
    yield executor
    executor.close()
    store.close()


def run(
    executor: Executor, tasks: dict[Operation, Callable[[], object]], passes: object = None
) -> list[Operation]:
    """Run operations with other tasks than their own; return those whose tasks have run."""
    finished: list[Operation] = []

    def handler(op: Operation) -> Callable[[], None]:
        def task() -> None:
            tasks[op]()
            finished.append(op)

        return task

    for op in tasks:
        executor.handlers[op.kind] = handler
    executor.run(lambda plan, cached: Program(tuple(tasks)), None, passes)
    return finished


def fail() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), "state.bin")


def test_operation_waits_only_for_those_that_touch_its_buffers(executor):
    is_written, is_read = threading.Event(), threading.Event()

    def read() -> None:
        assert is_written.wait(SECONDS), "another lane works meanwhile"
        is_read.set()

    def load() -> None:
        assert is_read.is_set(), "the slot that it uses was read before"

    finished = run(executor, {READ: read, LOAD: load, WRITE: is_written.set})
    executor.drain()
    assert sorted(finished, key=[WRITE, READ, LOAD].index) == finished


def test_first_failure_is_named_and_nothing_runs_after_it(executor):
    finished = run(executor, {READ: fail, LOAD: lambda: None})
    for _ in range(2):
        sentence = r"^the read of block.0 failed: Input/output error \(state.bin\)$"
        with pytest.raises(StateError, match=sentence):
            executor.drain()
        with pytest.raises(StateError, match=sentence):
            finished += run(executor, {FORWARD: lambda: None})  # in this thread
    assert finished == []


def test_error_of_the_program_itself_is_raised_as_it_is(executor):
    def divide() -> None:
        raise ZeroDivisionError("not of memory, disk or device")

    run(executor, {READ: divide})
    with pytest.raises(ZeroDivisionError):
        executor.drain()


def test_slots_hold_nothing_after_an_operation_failed(executor):
    given: list[dict[int, int]] = []

    def compile_program(plan, cached) -> Program:
        given.append(dict(cached))
        return Program((FORWARD,), cached={1: 0})

    executor.handlers[OperationKind.FORWARD] = lambda op: lambda: None
    executor.run(compile_program, None)
    executor.run(compile_program, None)
    executor.handlers[OperationKind.FORWARD] = lambda op: fail
    with pytest.raises(StateError, match="the forward of"):
        executor.run(compile_program, None)
    with pytest.raises(StateError, match="the forward of"):
        executor.run(compile_program, None)
    assert given == [{}, {1: 0}, {1: 0}, {}]


def test_interrupted_step_ends_after_its_last_change_of_the_state(executor):
    tasks = {op: lambda: None for op in (READ, WRITE, FORWARD, LOAD)}
    finished = run(executor, tasks, [SimpleNamespace(is_interrupted=True)])
    executor.drain()
    assert set(finished) == {READ, WRITE}, "the write belongs to the step before"


def test_update_that_waits_for_its_norm_is_not_run(executor):
    update = PendingUpdate("exact", 1e-3, 0.0, 1, (), EngineProgress())
    with pytest.raises(AssertionError, match="norm"):
        executor.run(lambda plan, cached: Program(()), update)
    update.clip_to(3.0, 2.0)
    assert update.is_ready and update.gradient_divisor == 1.5
    update.clip_to(1.0, 2.0)
    assert update.gradient_divisor == 1.0, "a small gradient is not made larger"
    executor.run(lambda plan, cached: Program(()), update)


def test_sum_of_updates_counts_each_part_once():
    parts = [None, torch.tensor([1, 2**31 - 1]), None, torch.tensor([2, 1])]
    updates = [
        SimpleNamespace(
            decode=lambda index, part=part: None if part is None else part.to(torch.int32)
        )
        for part in parts
    ]
    assert sum_of_updates(updates, 0).tolist() == [3, -(2**31)], "modulo 2³²"
    assert sum_of_updates(updates[:1], 0) is None


def test_memory_that_runs_out_is_named_with_its_size():
    failures = {
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has": (
            "not as much GPU memory left as it needs (2.1 GB more)"
        ),
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000 bytes": (
            "not as much memory left as it needs (4 MB more)"
        ),
    }
    for text, meaning in failures.items():
        kind = torch.OutOfMemoryError if "CUDA" in text else RuntimeError
        expected = pytest.raises(MemoryShortageError, match=re.escape(meaning))
        with expected as raised, naming_failures("validation failed"):
            raise kind(text)
        assert raised.value.device == ("CUDA" in text)
