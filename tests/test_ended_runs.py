"""A test run that is ended by a signal leaves no Postgres and no Valkey behind."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
from helpers.paths import ROOT, TESTS
from helpers.wait_for import wait_until

pytestmark = pytest.mark.integration

MAX_SECONDS = 30.0  # from the signal until no server is left
WAITING_TESTS = str(TESTS / "helpers" / "waiting_tests.py")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:schemathesis", WAITING_TESTS)
# In two processes, whatever the machine, and without the static checks.
RUN_SUITES = f"""
import sys
sys.path.append({str(TESTS / "helpers")!r})
import run_suites
run_suites.CHECKS = {{}}
run_suites.PROCESSES_PER_CORE["fast"] = 2
run_suites.os.cpu_count = lambda: 1
sys.argv = ["run_suites.py", "fast", {WAITING_TESTS!r}]
sys.exit(run_suites.main())
"""


class WaitingRun:
    """A test run whose processes have servers and wait."""

    def __init__(self, folder: Path, command: tuple[str, ...], processes: int):
        """Start it, and wait until so many processes have servers."""
        inherited = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
        for name in ("DATABASE_URL", "REDIS_URL", "BARNRAISE_STATE", "DJANGO_SETTINGS_MODULE"):
            inherited.pop(name, None)
        environment = {**inherited, "BARNRAISE_STARTED": str(folder)}
        with (folder / "output").open("w") as output:
            self.run = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output
            )
        try:
            wait_until(lambda: len(list(folder.glob("*.json"))) == processes, 180)
        except AssertionError:
            self.run.terminate()
            raise AssertionError((folder / "output").read_text()) from None
        # The state folder of each process.
        self.states = {
            pid: Path(state)
            for pid, state in (json.loads(path.read_text()) for path in folder.glob("*.json"))
        }

    def wait_for_servers_to_end(self) -> None:
        started = time.monotonic()
        while servers := find_servers(self.states.values()):
            assert time.monotonic() - started < MAX_SECONDS, servers
            time.sleep(0.1)


def find_servers(states: Iterable[Path]) -> list[str]:
    """Return the command lines of the processes that work in one of the folders."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join([process.cwd(), *process.cmdline()])
        except psutil.Error:  # it has ended
            continue
        if any(str(state) in line for state in states):
            found.append(line)
    return found


@pytest.mark.parametrize(
    ("command", "processes"),
    [
        pytest.param((sys.executable, "-c", RUN_SUITES), 2, id="suites in several processes"),
        pytest.param(PYTEST, 1, id="pytest alone", marks=pytest.mark.slow),
    ],
)
def test_sigterm_to_a_test_run_ends_its_servers(tmp_path, command, processes):
    waiting = WaitingRun(tmp_path, command, processes)
    assert len(find_servers(waiting.states.values())) >= 2 * processes
    waiting.run.terminate()
    waiting.wait_for_servers_to_end()
    assert waiting.run.wait(MAX_SECONDS) != 0
    assert not [state for state in waiting.states.values() if state.exists()]


@pytest.mark.slow
def test_killed_test_process_leaves_no_server(tmp_path):
    waiting = WaitingRun(tmp_path, PYTEST, 1)
    waiting.run.kill()
    waiting.wait_for_servers_to_end()
    assert list(waiting.states) == [waiting.run.pid]
