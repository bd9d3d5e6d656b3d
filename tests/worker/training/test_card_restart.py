"""A GPU that is lost costs a restart of the process, a few times an hour."""

import os
import sys
import time

import pytest
from helpers.python_code import run_python
from hypothesis import given
from hypothesis import strategies as st

from barnraise.errors import DeviceLostError, MemoryShortageError, RankLostError
from barnraise.swap.device import LOST_CARDS
from barnraise.swap.sharded.torchrun import ONE_RANK
from barnraise.training import card_restart
from barnraise.training.card_restart import (
    RESTARTS,
    RESTARTS_SECONDS,
    VARIABLE,
    find_device_loss,
    recent_restarts,
    run_with_restarts,
)

LOST = RuntimeError("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA")
# Trains in a process whose card fails as often as an argument says, over all its restarts.
PROGRAM = """
import sys
from barnraise.errors import DeviceLostError
from barnraise.training.card_restart import run_with_restarts, recent_restarts
import os, time
failures = int(sys.argv[1])
def train():
    try:
        if len(recent_restarts(os.environ, time.time())) < failures:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        print("trained in process", os.getpid())
    finally:
        if failures:
            raise OSError("cleaning up failed as well") if sys.exc_info()[0] else SystemExit
try:
    run_with_restarts(train, lambda seconds: False, time.time)
except DeviceLostError as error:
    print(error)
"""


def test_lost_card_costs_a_restart_with_the_same_arguments():
    done = run_python(PROGRAM, 1)
    assert done.stderr == "" or "Traceback" not in done.stderr
    assert done.stdout.startswith("trained in process")


def test_card_that_is_lost_again_and_again_ends_the_worker_with_a_sentence(monkeypatch):
    earlier = (time.time() - 60.0 * number for number in range(1, RESTARTS))
    monkeypatch.setenv(VARIABLE, ",".join(map(str, earlier)))
    done = run_python(PROGRAM, 100)  # restarts once more, then ends
    assert f"the GPU was lost {RESTARTS + 1} times within an hour" in done.stdout
    assert "an illegal memory access" in done.stdout and "--device cpu" in done.stdout


def test_lost_card_of_several_is_named_to_the_next_process(monkeypatch):
    restarted = []
    monkeypatch.setattr(card_restart, "restart_process", restarted.append)
    monkeypatch.setenv(LOST_CARDS, "cuda:2")

    def train() -> None:
        raise DeviceLostError("the backward of block.3 on cuda:1 failed: it is gone", "cuda:1")

    run_with_restarts(train, lambda seconds: False, lambda: 0.0)
    assert restarted == [[0.0]] and os.environ[LOST_CARDS] == "cuda:1,cuda:2"


def test_ranks_that_are_lost_again_and_again_leave_one_card(monkeypatch):
    restarted = []
    monkeypatch.setattr(card_restart, "restart_process", restarted.append)
    monkeypatch.delenv(ONE_RANK, raising=False)

    def train() -> None:
        raise RankLostError("rank 1 has not answered for 10 seconds")

    monkeypatch.setenv(VARIABLE, "10,20")
    run_with_restarts(train, lambda seconds: False, lambda: 30.0)
    assert restarted == [[10.0, 20.0, 30.0]] and ONE_RANK not in os.environ
    monkeypatch.setenv(VARIABLE, "10,20,30")
    run_with_restarts(train, lambda seconds: False, lambda: 40.0)
    assert restarted[-1] == [40.0] and os.environ[ONE_RANK] == "1"


def test_machine_that_leaves_is_not_restarted():
    def train() -> None:
        raise LOST

    with pytest.raises(DeviceLostError, match="what was saved is whole"):
        run_with_restarts(train, lambda seconds: True, lambda: 0.0)
    assert VARIABLE not in os.environ


@pytest.mark.parametrize("error", [ValueError("no card"), MemoryShortageError("short", True)])
def test_other_errors_pass(error):
    def train() -> None:
        raise error

    with pytest.raises(type(error)):
        run_with_restarts(train, lambda seconds: sys.exit("waited"), lambda: 0.0)


def test_loss_is_found_behind_an_error_of_cleaning_up():
    try:
        try:
            raise LOST
        finally:
            raise OSError("unpinning failed")
    except OSError as error:
        assert find_device_loss(error) is LOST


@given(st.lists(st.floats(-1e4, 1e10)), st.floats(0, 1e9))
def test_only_restarts_of_the_last_hour_count(times, now):
    environment = {VARIABLE: ",".join(map(str, times)) + ",x,"}
    recent = recent_restarts(environment, now)
    assert recent == [at for at in times if now - RESTARTS_SECONDS < at <= now]
