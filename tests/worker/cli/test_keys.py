"""Test that single keys reach the program, and that the terminal is as before afterwards."""

import os
import pty
import select
import subprocess
import termios

from helpers.python_code import run_python, start_python

SHOW_KEYS = """
import sys, threading
from barnraise.cli.keys import read_keys

done = threading.Event()

def show(key):
    print(f"<{key}>", flush=True)
    if key == "q":
        done.set()

with read_keys(show) as can_read:
    print(f"can read: {can_read}", flush=True)
    done.wait(60 if can_read else 0)
"""


def read_until(descriptor: int, expected: str) -> str:
    """Read what a terminal shows until it shows this."""
    shown = ""
    while expected not in shown:
        ready, _, _ = select.select([descriptor], [], [], 60)
        assert ready, shown
        shown += os.read(descriptor, 1024).decode()
    return shown


def test_keys_are_read_without_enter_and_the_terminal_is_restored():
    parent, child = pty.openpty()
    before = termios.tcgetattr(child)
    process = start_python(
        SHOW_KEYS,
        stdin=child,
        stdout=child,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # its own terminal
    )
    read_until(parent, "can read: True")
    os.write(parent, b"P")
    assert "P<P>" not in read_until(parent, "<P>"), "the key is not echoed"
    os.write(parent, b"q")
    read_until(parent, "<q>")
    assert process.wait(60) == 0
    assert termios.tcgetattr(child) == before
    os.close(parent)
    os.close(child)


def test_keys_are_not_read_where_the_input_is_no_terminal():
    result = run_python(SHOW_KEYS, stdin=subprocess.DEVNULL, check=True)
    assert result.stdout == "can read: False\n"
