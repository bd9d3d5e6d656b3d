"""A command leaves on every kind of ending, and ends at once at the second Ctrl-C."""

import os
import pty
import signal
import subprocess
import threading

import pytest
from helpers.python_code import start_python

from barnraise.cli import signals
from barnraise.cli.signals import SAME_PRESS_SECONDS, StopRequests

# A command that leaves in an orderly way, and one that is busy in C code for minutes.
LEAVES = """
import sys, time
from barnraise.cli.console import errors
from barnraise.cli.signals import stop_on_signals

leaving = stop_on_signals()
print("ready", flush=True)
assert leaving.wait(120)
for _ in range(20):
    errors.print("a line for a terminal that may be gone")
open(sys.argv[1], "w").write("saved")
"""
BUSY = """
import sqlite3
from barnraise.cli import signals

signals.LEAVE_LIMIT_SECONDS = float(__import__("sys").argv[1])
leaving = signals.stop_on_signals()
print("ready", flush=True)
count = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n) SELECT sum(i) FROM n"
sqlite3.connect(":memory:").execute(count).fetchone()
"""


def obey_signals() -> None:
    """Undo what a shell's `nohup` or `&` does: its programs ignore some signals."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(code: str, *arguments: str, **options) -> subprocess.Popen:
    """Start Python code, and wait until it prints that it is ready."""
    options = {"stderr": subprocess.PIPE, "preexec_fn": obey_signals, **options}
    process = start_python(code, *arguments, **options)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_command_leaves_in_order_at_each_signal(tmp_path, number):
    process = start(LEAVES, str(tmp_path / "done"))
    process.send_signal(number)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 0, errors
    assert (tmp_path / "done").read_text() == "saved"


def test_command_saves_its_work_when_its_terminal_is_closed(tmp_path):
    controller, terminal = pty.openpty()
    process = start(
        LEAVES, str(tmp_path / "done"), stdin=terminal, stderr=terminal, start_new_session=True
    )
    os.close(terminal)
    os.close(controller)  # what is written to the terminal from now on is an error
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=120)
    assert process.returncode == 0 and (tmp_path / "done").read_text() == "saved"


def test_command_under_nohup_goes_on_without_its_terminal():
    code = """
import signal
from barnraise.cli.signals import stop_on_signals

signal.signal(signal.SIGHUP, signal.SIG_IGN)
leaving = stop_on_signals()
signal.raise_signal(signal.SIGHUP)
assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and not leaving.is_set()
print("ready", flush=True)
"""
    assert start(code).wait(120) == 0


def test_second_ctrl_c_ends_a_busy_command_at_once():
    process = start(BUSY, "600")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None and "Stopping" in process.stderr.readline()
    while process.poll() is None:  # a press within a moment of the first is the same one
        process.send_signal(signal.SIGINT)
        threading.Event().wait(SAME_PRESS_SECONDS)
    assert process.returncode == 130 and "Stopped at once" in process.communicate()[1]


def test_busy_command_ends_at_the_limit_of_leaving():
    process = start(BUSY, "0.2")
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 1 and "published and saved before is safe" in errors


def test_only_a_later_ctrl_c_ends_the_process():
    endings: list[int] = []
    requests = StopRequests(lambda code, sentence: endings.append(code))
    requests.receive(signal.SIGHUP, 10.0)
    requests.receive(signal.SIGTERM, 11.0)
    assert requests.leaving.is_set() and not endings
    requests.receive(signal.SIGINT, 10.0 + SAME_PRESS_SECONDS / 2)
    assert not endings, "a shell and a parent may pass on one key press"
    requests.receive(signal.SIGINT, 12.0)
    assert endings == [signals.INTERRUPTED_CODE]


@pytest.mark.parametrize(("event", "leaves"), [(0, False), (1, False), (2, True), (5, True)])
def test_closed_console_of_windows_asks_to_leave_and_waits(event, leaves):
    waits: list[float] = []
    requests = StopRequests(lambda code, sentence: None)
    assert requests.receive_console_event(event, waits.append) == leaves
    assert requests.leaving.is_set() == bool(waits) == leaves
