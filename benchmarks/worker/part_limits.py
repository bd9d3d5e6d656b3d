"""How soon a rule is obeyed, what training costs other programs, and how soon it begins."""

import multiprocessing
import shutil
import subprocess
import time
from typing import Any

from worker_lab import TestedWorker, WorkerLab

from barnraise.planning.limits import Limits
from barnraise.protocol.enums import Activity

PROGRAM = "bench-program"  # copied from `sleep`, so that nothing else has its name
TURN_SECONDS = 1.0  # of another program's work, with and without the worker


def measure(lab: WorkerLab) -> dict[str, Any]:
    """Measure join_to_first_step_s, decision_s and foreground_loss."""
    home = lab.create_home("ruled")
    home.limits = Limits(pause_for=(PROGRAM,))
    worker = lab.start(home)
    seconds = worker.wait_until(lambda status: status.step >= 1, "the first step")
    results = {"join_to_first_step_s": round(seconds, 1)}
    results |= {
        "foreground_loss": round(max(0.0, _measure_loss(lab, worker)), 3),
        "decision_s": _measure_decision(lab, worker),
    }
    worker.stop()
    return results


def _measure_decision(lab: WorkerLab, worker: TestedWorker) -> float:
    """Return the seconds from the start of a program that goes first to the pause."""
    worker.wait_until(lambda status: status.activity is Activity.TRAINING, "training")
    program = lab.folder / PROGRAM
    sleep = shutil.which("sleep")
    assert sleep is not None
    shutil.copy(sleep, program)
    with subprocess.Popen([program, "60"]) as process:
        try:
            seconds = worker.wait_until(
                lambda status: status.activity is Activity.PAUSED, "the pause for a program"
            )
        finally:
            process.kill()
    assert worker.status is not None and PROGRAM in worker.status.reason
    return round(seconds, 2)


def _measure_loss(lab: WorkerLab, worker: TestedWorker) -> float:
    """Return the share that a program of normal priority, on all cores, loses by the worker.

    The worker is suspended in every other turn, because a virtual machine's speed may change more
    in a minute than the worker costs.
    """
    worker.wait_until(lambda status: status.activity is Activity.TRAINING, "training")
    cores = multiprocessing.cpu_count()
    alone = beside = 0
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        pool.map(_spin, [0.1] * cores, chunksize=1)  # the processes have started
        for _ in range(5 if lab.is_quick else 30):
            with worker.suspended():
                alone += sum(pool.map(_spin, [TURN_SECONDS] * cores, chunksize=1))
            beside += sum(pool.map(_spin, [TURN_SECONDS] * cores, chunksize=1))
    return 1 - beside / alone


def _spin(seconds: float) -> int:
    """Compute for some seconds; return how far that went."""
    ends = time.monotonic() + seconds
    count = 0
    while time.monotonic() < ends:
        count += sum(range(1000)) > 0
    return count
