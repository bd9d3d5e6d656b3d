"""Compute how many machines this site bears, from its web processes.

Of the figures of docs/benchmarks/site.md: two web processes bore 2,000 machines, and as many
people who watched them, with 67 reports a second. One process computes the snapshot of a run, and
the broadcasts of it become rarer: that bounds one run. `report_pace` lengthens the intervals by
itself, so that the machines below the bound never report too often.
"""

import functools
import os
import re
from collections.abc import Mapping, Sequence

import psutil

from coordinator.telemetry.report_pace import LONGEST_INTERVAL_SECONDS

MACHINES_PER_PROCESS = 1_000
REPORTS_PER_PROCESS = 33  # a second
MACHINES_PER_RUN = 20_000
OPTION = re.compile(r"--workers[= ]([0-9]+)")


def bearable_machines(processes: int, interval: float = LONGEST_INTERVAL_SECONDS) -> int:
    """Return how many machines report to so many web processes each `interval` seconds. Pure."""
    by_reports = int(REPORTS_PER_PROCESS * processes * interval)
    return min(by_reports, MACHINES_PER_PROCESS * processes, MACHINES_PER_RUN)


def describe_capacity(processes: int, interval: float) -> str:
    """Return how many machines a host with so many web processes bears, as sentences. Pure."""
    noun = "web process bears" if processes == 1 else f"{processes} web processes bear"
    most = bearable_machines(processes)
    sentence = f"This host's {noun} some {most:,} machines"
    at_own_interval = bearable_machines(processes, interval)
    if at_own_interval < most:
        sentence += (
            f", {at_own_interval:,} of them at {interval:g} s: with more the site lengthens the "
            f"interval, to {LONGEST_INTERVAL_SECONDS:.0f} s at most"
        )
    if most == MACHINES_PER_RUN:
        return f"{sentence}. That is the most in one run."
    return f"{sentence}. Each other host bears its own, up to {MACHINES_PER_RUN:,} in one run."


def count_processes(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return how many processes uvicorn's command line, or its variable, asks for. Pure."""
    option = OPTION.search(" ".join(command))
    number = option[1] if option else environment.get("WEB_CONCURRENCY", "")
    return max(1, int(number)) if number.isdecimal() else 1


@functools.cache
def count_web_processes() -> int:
    """Return how many web processes this host runs: those of the uvicorn that started this one."""
    process = psutil.Process()
    try:
        parent = process.parent()
        lines = [process.cmdline(), parent.cmdline() if parent is not None else []]
    except psutil.Error:  # a container may hide the parent
        lines = []
    return count_processes([part for line in lines for part in line], os.environ)
