"""Recognise a process again, although its pid may belong to another one by now."""

import time
from pathlib import Path

import psutil

# Tolerance for the time at which a process started: the system computes it from the wall clock.
START_TIME_TOLERANCE = 60.0  # seconds


def start_time(pid: int) -> float:
    """Return when a process started; 0 if there is none. With the pid it identifies a process."""
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return 0.0


def is_same_process(pid: int, started: float) -> bool:
    """Return whether the process that started then still runs, not another one with its pid."""
    actual = start_time(pid)
    return actual > 0 and abs(actual - started) < START_TIME_TOLERANCE


def works_in(process: psutil.Process, folder: Path) -> bool:
    """Return whether a live process has this working directory, as both servers have theirs."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        # The root of a container may not look. Postgres names its folder on the command line too.
        try:
            return str(folder) in process.cmdline()
        except psutil.Error:
            return False


def wait_for_end(process: psutil.Process, seconds: float) -> bool:
    """Wait until a process ends, whether its parent reaps it or not; return whether it did."""
    deadline = time.monotonic() + seconds
    while start_time(process.pid) and process.is_running():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
