"""Run one tier of tests and print the seconds of each suite.

Usage: `python tests/helpers/run_suites.py TIER`. TIER is one of `worker` (the worker's unit tests,
which need neither the site nor a browser), `fast` (unit and contract tests), `default` (everything
but `slow`) and `all`. The static checks run at the same time as the Python tests, which share the
processor's cores. The check of types takes as long as a sixth of the fast tests and is left to the
other tiers, and to `make lint`; the worker's tests run without any.

Six processes that start servers, browsers and swarms on two cores can make one of thousands of
tests late. Up to three failed tests run once more, alone; those that pass then are named as
unsteady, and the run passes. A test that is named twice needs a repair.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
BIN = Path(PYTHON).parent
CHECKS = {
    "lint": [str(BIN / "ruff"), "check", "--quiet", "."],
    "format": [str(BIN / "ruff"), "format", "--quiet", "--check", "."],
    "types": [str(BIN / "basedpyright"), "--level", "error"],
    "imports": [str(BIN / "lint-imports")],
    "frontend": [PYTHON, "frontend/build.py", "--test"],
}
# What is only reported: a vulnerability of a dependency is no failure of this commit, and where no
# registry answers nothing is known. Only CI asks each time; `make audit` does it for people.
ADVISORY = {"audit": [PYTHON, "tests/helpers/dependency_audit.py"]}
UNIT = "not slow and not integration"
MARKERS = {"worker": UNIT, "fast": UNIT, "default": "not slow", "all": ""}
# More processes than cores: tests of servers and swarms spend most of their time waiting. Fast
# tests compute more, and each process costs 20 s of a core for its start and its database.
PROCESSES_PER_CORE = {"worker": 2, "fast": 2, "default": 3, "all": 3}
SOME_FAILED = 1  # pytest's exit code; others say that it was interrupted or could not begin
MAX_REPEATED = 3  # failed tests; more are no accident
GROUP_SUFFIX = re.compile(r"@[^@\]]*$")
END_SECONDS = 20.0  # from SIGTERM on, which tests may take to stop their servers


class ChildCommands:
    """The commands that run. SIGTERM is passed on to them, so that tests stop their servers."""

    def __init__(self) -> None:
        """Pass SIGTERM on from now on."""
        self._running: set[subprocess.Popen[str]] = set()
        self._is_ending = False
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, number: int, frame: object) -> None:
        self._is_ending = True
        for process in list(self._running):
            process.terminate()
        killer = threading.Timer(END_SECONDS, self._kill)
        killer.daemon = True
        killer.start()

    def _kill(self) -> None:
        """End what SIGTERM did not: a thread of pytest-xdist can wait for ever for a process."""
        for process in list(self._running):
            process.kill()

    def run(self, command: list[str], **options: Any) -> tuple[int, str]:
        """Run a command until it ends; return its exit code, and its output if that is a pipe.

        Args:
            command: The command line.
            options: Arguments of `subprocess.Popen`.
        """
        process = subprocess.Popen(command, cwd=ROOT, text=True, **options)
        self._running.add(process)
        if self._is_ending:
            process.terminate()
        output, _ = process.communicate()
        self._running.discard(process)
        return process.returncode, output or ""


class StaticChecks:
    """The static checks, which run at the same time as the Python tests."""

    def __init__(self, tier: str, children: ChildCommands) -> None:
        """Start the tier's checks, and in CI the advisory ones."""
        self.commands = {**CHECKS, **(ADVISORY if os.environ.get("CI") else {})}
        if tier == "worker":
            self.commands = {}
        elif tier == "fast":
            self.commands.pop("types", None)
        self._children = children
        self.started = time.monotonic()
        self.results: dict[str, tuple[float, int]] = {}  # name → seconds, exit code
        self.outputs: dict[str, str] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(name, command))
            for name, command in self.commands.items()
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, name: str, command: list[str]) -> None:
        code, output = self._children.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(("platform", "worker"))},
        )
        self.results[name] = (time.monotonic() - self.started, code)
        self.outputs[name] = output

    def finish(self) -> dict[str, tuple[float, int]]:
        """Wait for all; print what failed and the frontend's tests; return the results."""
        for thread in self._threads:
            thread.join()
        for name in self.commands:
            if self.results[name][1] or name in ("frontend", *ADVISORY):
                print(self.outputs[name], flush=True)
        return {name: self.results[name] for name in self.commands}


def run_python_tests(tier: str, rest: list[str], children: ChildCommands) -> tuple[float, int]:
    """Run the tier's Python tests on all cores; return the seconds and pytest's exit code.

    Property tests try the same cases each time here; plain pytest tries others each time.
    """
    processes = str(PROCESSES_PER_CORE[tier] * (os.cpu_count() or 1))
    profile = "ci" if tier == "all" else "few"  # see tests/conftest.py
    command = [PYTHON, "-m", "pytest", "-q", f"--hypothesis-profile={profile}"]
    command += ["-m", MARKERS[tier], *rest]
    if tier != "all":  # only a slow test needs this plugin, which each process would import
        command += ["-p", "no:schemathesis"]
    if tier == "worker":
        # Commands are integration tests, and some of their modules need a POSIX terminal to load.
        command += ["-p", "no:django", "--ignore=tests/worker/cli", "tests/worker"]
    environment = {**os.environ, "BARNRAISE_TESTS": tier}
    # Without bytecode, each of the hundreds of processes that tests start compiles the program.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    started = time.monotonic()
    compile_tests(environment, children)
    with tempfile.TemporaryDirectory() as folder:
        command += ["-o", f"cache_dir={folder}"]
        in_processes = ["-n", processes, "--dist", "loadgroup"]
        code, _ = children.run([*command, *in_processes], env=environment)
        failed = read_failed(Path(folder))
        if code == SOME_FAILED and 0 < len(failed) <= MAX_REPEATED:
            code, _ = children.run([*command, "--last-failed"], env=environment)
            failed_again = read_failed(Path(folder)) if code else []
            for test in failed:
                outcome = "failed again" if test in failed_again else "UNSTEADY, passed alone"
                print(f"{outcome}: {test}", flush=True)
    return time.monotonic() - started, code


def read_failed(cache: Path) -> list[str]:
    """Return the tests that failed, which pytest lists in its cache.

    With processes that each run groups of tests, a test's name ends with its group's. Alone it has
    another name, and pytest would run all tests because it finds none of the list: so the list is
    written again, without groups.
    """
    path = cache / "v" / "cache" / "lastfailed"
    if not path.exists():
        return []
    failed = sorted({GROUP_SUFFIX.sub("", test) for test in json.loads(path.read_text())})
    path.write_text(json.dumps(dict.fromkeys(failed, True)))
    return failed


def compile_tests(environment: dict[str, str], children: ChildCommands) -> None:
    """Let one process compile the tests of a fresh clone.

    Pytest rewrites each `assert` for its message, which takes 13 s of a core. All of its processes
    start at once, and without stored results each would do all of it.
    """
    if any((ROOT / "tests" / "__pycache__").glob("conftest.*pytest*.pyc")):
        return
    # What fails here fails again, and is printed, when the tests run.
    command = [PYTHON, "-m", "pytest", "-q", "--collect-only", "-p", "no:schemathesis"]
    children.run(command, env=environment, stdout=subprocess.DEVNULL)


def describe_outcome(name: str, code: int) -> str:
    """Return what the table says about a suite; an advisory one never fails."""
    if code == 0:
        return ""
    return "WARNING: see the list above" if name in ADVISORY else "FAILED"


def main() -> int:
    """Run the checks and the tests; return 1 when any of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tier", choices=MARKERS)
    parser.add_argument("rest", nargs="*", help="further arguments of pytest")
    arguments = parser.parse_args()
    started = time.monotonic()
    children = ChildCommands()
    checks = StaticChecks(arguments.tier, children)
    python_tests = run_python_tests(arguments.tier, arguments.rest, children)
    results = {**checks.finish(), "python tests": python_tests}
    print(f"\n{'suite':14} {'seconds':>8}")
    for name, (seconds, code) in results.items():
        print(f"{name:14} {seconds:8.1f} {describe_outcome(name, code)}")
    print(f"{'all':14} {time.monotonic() - started:8.1f}", flush=True)
    return int(any(code for name, (_, code) in results.items() if name not in ADVISORY))


if __name__ == "__main__":
    sys.exit(main())
