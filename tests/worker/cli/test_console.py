"""Test how a log looks on a terminal."""

import io
import logging

import pytest
from rich.console import Console

from barnraise.cli import console
from barnraise.cli.console import TerminalLogHandler


@pytest.fixture
def terminal(monkeypatch):
    """Return what a terminal of 60 columns shows."""
    shown = io.StringIO()
    monkeypatch.setattr(
        console, "errors", Console(file=shown, force_terminal=True, width=60, color_system=None)
    )
    return shown


@pytest.mark.parametrize(
    ("level", "message", "expected"),
    [
        (logging.INFO, "the plan: 4 layers [bold]", "the plan: 4 layers [bold]"),
        (logging.WARNING, "only one", "warning: only one"),
        (logging.ERROR, "no [/] space", "error: no [/] space"),
    ],
)
def test_log_line_has_the_time_and_says_its_level_at_most_once(terminal, level, message, expected):
    handler = TerminalLogHandler()
    handler.handle(logging.LogRecord("barnraise", level, "", 0, message, None, None))
    time, _, rest = terminal.getvalue().rstrip().partition(" ")
    assert len(time) == 8 and time.count(":") == 2
    assert rest.strip() == expected


def test_long_log_line_is_wrapped_below_its_message(terminal):
    handler = TerminalLogHandler()
    handler.handle(logging.LogRecord("barnraise", logging.INFO, "", 0, "word " * 30, None, None))
    lines = terminal.getvalue().rstrip().splitlines()
    assert len(lines) > 2 and all(line.startswith(" " * 9) for line in lines[1:])
