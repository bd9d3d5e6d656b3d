"""A failed test that passes alone is named; one that fails again fails the run."""

import subprocess
import sys

import pytest
from helpers.paths import ROOT, TESTS

TEST = """
from pathlib import Path

import pytest

@pytest.mark.xdist_group("of two")
@pytest.mark.parametrize("number", range({tests}))
def test_fails_at_first(number):
    mark = Path(__file__).with_name(f"failed-{{number}}")
    times = len(mark.read_text()) if mark.exists() else 0
    mark.write_text("x" * (times + 1))
    assert times >= {failures}
"""
STEADY = """
from pathlib import Path

def test_steady():
    with Path(__file__).with_name("steady").open("a") as mark:
        mark.write("x")
"""
RUN = """
import os, sys
sys.path.append({helpers!r})
import run_suites
run_suites.CHECKS = {{}}
run_suites.os.cpu_count = lambda: 1
run_suites.PROCESSES_PER_CORE["all"] = 2
run_suites.compile_tests = lambda environment, children: None
options = ["--noconftest", "-c", os.devnull, "--rootdir", {folder!r}]
options += ["-p", "no:django", "-p", "no:schemathesis"]
sys.argv = ["run_suites.py", "all", "--", {folder!r}, *options]
sys.exit(run_suites.main())
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("tests", "failures", "code", "outcome", "times"),
    [
        pytest.param(1, 0, 0, "", 1, id="passes", marks=pytest.mark.slow),
        pytest.param(2, 1, 0, "UNSTEADY, passed alone: ", 2, id="fails once"),
        pytest.param(2, 9, 1, "failed again: ", 2, id="fails again"),
        pytest.param(4, 1, 1, "", 1, id="too many fail"),
    ],
)
def test_failed_tests_run_again_alone(tmp_path, tests, failures, code, outcome, times):
    (tmp_path / "test_unsteady.py").write_text(TEST.format(tests=tests, failures=failures))
    (tmp_path / "test_steady.py").write_text(STEADY)
    program = RUN.format(helpers=str(TESTS / "helpers"), folder=str(tmp_path))
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == code, run.stdout + run.stderr
    named = [line for line in run.stdout.splitlines() if "test_fails_at_first[" in line]
    if outcome:
        assert sum(line.startswith(outcome) for line in named) == tests, run.stdout
    assert {len(mark.read_text()) for mark in tmp_path.glob("failed-*")} == {times}
    assert (tmp_path / "steady").read_text() == "x", "what passed is not run again"
