"""Test how `barnraise join` starts: its errors and its priority."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.python_code import run_python
from helpers.worker.command_line import assert_fails
from helpers.worker.fake_coordinator import FakeCoordinator, enrol

from barnraise.protocol.coordinator_messages import Problem
from barnraise.state_dir import StateDir

# Join without measuring the machine, which takes ten seconds.
JOIN_UNMEASURED = """
from barnraise.cli import join, main

join.measure_ranks = lambda *arguments: None
join.hardware_view = lambda hardware: None
main.main()
"""
# Print the priority of the process and of its session instead of measuring the machine.
PRINT_PRIORITY = """
import psutil, sys
from barnraise.cli import join, main

def print_priority(*arguments):
    own = psutil.Process().nice()
    words = join.AUTOGROUP.read_text().split() if join.AUTOGROUP.exists() else []
    session = words[-1] if words else own
    sys.exit(f"{own} {session}")

join.measure_ranks = print_priority
main.main()
"""


def run_join(code: str, home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run Python code with the arguments of `barnraise join`."""
    return run_python(code, "join", "a-run", "--home", home, *options)


def test_error_that_looks_like_markup_is_printed_as_it_is(tmp_path):
    coordinator = FakeCoordinator()
    try:
        enrol(StateDir(tmp_path), coordinator.url, coordinator.identity.key)
        problem = Problem(error="there is no run [/bold] here")
        coordinator.routes["GET /runs/a-run"] = lambda body: (404, problem)
        result = run_join(JOIN_UNMEASURED, tmp_path)
        assert_fails(result, "there is no run [/bold] here")
    finally:
        coordinator.close()


def test_session_has_its_priority_again_after_a_join(tmp_path):
    """What a person starts next in this terminal is no idle program."""
    command = [sys.executable, "-m", "barnraise", "join", "a-run", "--home", str(tmp_path)]
    code = f"import subprocess; from barnraise.cli import join; subprocess.run({command})\n"
    code += "print(0, join.AUTOGROUP.read_text() if join.AUTOGROUP.exists() else '')"
    result = run_python(code)
    assert "not enrolled" in result.stderr and result.stdout.split()[-1] == "0", result


def test_process_without_a_session_group_starts(tmp_path):
    """Its file is empty: it was started before the first session, as in some containers."""
    empty = tmp_path / "autogroup"
    empty.touch()
    code = "from pathlib import Path; from barnraise.cli import join\n"
    code += f"join.AUTOGROUP = Path({str(empty)!r}); join.lower_priority(); print(os.nice(0))"
    assert run_python("import os\n" + code).stdout.split() == ["19"]
    assert not empty.read_text()


@pytest.mark.parametrize(("options", "niceness"), [((), 19), (("--eager",), 0)])
def test_join_lowers_its_priority_unless_eager(tmp_path, options, niceness):
    enrol(StateDir(tmp_path), "http://127.0.0.1:9", StateDir(tmp_path).identity.key)
    result = run_join(PRINT_PRIORITY, tmp_path, *options)
    expected = [str(max(niceness, os.nice(0))), str(niceness)]
    assert result.stderr.split()[-2:] == expected, result.stderr
