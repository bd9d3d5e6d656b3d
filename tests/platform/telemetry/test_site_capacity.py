"""Test what a site says that it bears, and how it learns of its web processes."""

import os
import subprocess
import sys

import pytest
from helpers.paths import ROOT

from coordinator.telemetry.site_capacity import (
    bearable_machines,
    count_processes,
    describe_capacity,
)

UVICORN = ("python", "uvicorn", "coordinator.asgi:application", "--workers", "4", "--no-access-log")


@pytest.mark.parametrize(
    ("processes", "interval", "machines"),
    [
        (2, 60.0, 2_000),  # measured
        (1, 60.0, 1_000),
        (2, 5.0, 330),
        (2, 10.0, 660),
        (20, 60.0, 20_000),
        (64, 60.0, 20_000),  # one process computes a run's snapshot
    ],
)
def test_machines_follow_from_processes_and_interval(processes, interval, machines):
    assert bearable_machines(processes, interval) == machines


def test_help_names_the_machines_at_the_runs_interval_and_at_most():
    assert describe_capacity(2, 5.0) == (
        "This host's 2 web processes bear some 2,000 machines, 330 of them at 5 s: with more the "
        "site lengthens the interval, to 60 s at most. Each other host bears its own, up to 20,000 "
        "in one run."
    )
    assert describe_capacity(1, 3600.0).startswith("This host's web process bears some 1,000 mach")
    assert describe_capacity(64, 60.0).endswith("20,000 machines. That is the most in one run.")


@pytest.mark.parametrize(
    ("command", "environment", "processes"),
    [
        (UVICORN, {}, 4),
        (UVICORN, {"WEB_CONCURRENCY": "8"}, 4),
        (UVICORN[:3], {"WEB_CONCURRENCY": "8"}, 8),
        (("uvicorn", "--workers=3"), {}, 3),
        (UVICORN[:3], {}, 1),
        ([], {"WEB_CONCURRENCY": "many"}, 1),
        (UVICORN[:4], {}, 1),
    ],
)
def test_processes_are_those_that_uvicorn_was_started_with(command, environment, processes):
    assert count_processes(command, environment) == processes


def test_process_that_uvicorn_started_finds_its_number():
    child = "from coordinator.telemetry import site_capacity as c; print(c.count_web_processes())"
    starter = (
        "import subprocess, sys; "
        "print(subprocess.check_output([sys.executable, '-c', sys.argv[1]], text=True))"
    )
    command = [sys.executable, "-c", starter, child, "--workers", "3"]
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("platform", "worker"))
    environment = os.environ | {"PYTHONPATH": paths}
    assert subprocess.check_output(command, text=True, env=environment).strip() == "3"
