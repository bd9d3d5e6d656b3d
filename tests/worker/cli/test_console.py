"""Test how a log looks on a terminal."""

import ast
import io
import logging

import pytest
from helpers.paths import ROOT
from hypothesis import given
from hypothesis import strategies as st
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from barnraise.cli import console
from barnraise.cli.console import SafeConsole, SafeFormatter, TerminalLogHandler, new_table
from barnraise.peering.limits.repeated_warnings import RepeatedWarnings


@pytest.fixture
def terminal(monkeypatch):
    """Return what a terminal of 60 columns shows."""
    shown = io.StringIO()
    monkeypatch.setattr(
        console, "errors", SafeConsole(file=shown, force_terminal=True, width=60, color_system=None)
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


def test_what_strangers_do_is_in_the_log_file_and_not_on_the_terminal(terminal, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    file = io.StringIO()
    console.configure_logging(logging.StreamHandler(file))
    RepeatedWarnings().warn("proof", "an incoming TCP connection was refused")
    RepeatedWarnings(logging.getLogger("barnraise")).warn("name", "your name has no address")
    assert "refused" not in terminal.getvalue() and "your name" in terminal.getvalue()
    assert "refused" in file.getvalue() and "your name" in file.getvalue()


def test_long_log_line_is_wrapped_below_its_message(terminal):
    handler = TerminalLogHandler()
    handler.handle(logging.LogRecord("barnraise", logging.INFO, "", 0, "word " * 30, None, None))
    lines = terminal.getvalue().rstrip().splitlines()
    assert len(lines) > 2 and all(line.startswith(" " * 9) for line in lines[1:])
    assert all(len(line) <= 60 for line in lines)


ADDRESS = "http://127.0.0.1:20659/machines/01a2293b-1517-71b9-addb-35ce68656d48/#confirm"


def test_address_in_a_log_or_a_sentence_is_not_broken(terminal):
    sentence = f"it waits: confirm at {ADDRESS} that this machine may sign for your runs"
    record = logging.LogRecord("barnraise", logging.WARNING, "", 0, sentence, None, None)
    TerminalLogHandler().handle(record)
    console.errors.print_sentence(f"[bold]barnraise:[/] {sentence}")
    lines = [line.strip() for line in terminal.getvalue().splitlines()]
    assert lines.count(ADDRESS) == 2, lines
    assert "that this machine may sign for your runs" in lines


def test_table_of_a_narrow_terminal_cuts_nothing_off(terminal):
    table = new_table("tokens", "digest")
    table.add_row("8,000,000", "ab" * 32)
    console.errors.print(table)
    assert "…" not in terminal.getvalue()
    assert "ab" * 32 in "".join(line[11:].strip() for line in terminal.getvalue().splitlines()[1:])


def test_sentence_stays_one_line_where_programs_read_it():
    shown = io.StringIO()
    SafeConsole(file=shown, width=60).print_sentence("word " * 30)
    assert shown.getvalue().count("\n") == 1


OWNED = "good \x1b]0;owned\x07\x1b[2J\u202e\x9bevil"
HARMLESS = "good  ]0;owned [2J "  # Rich removes the bell


@pytest.mark.parametrize(
    "shown", [OWNED, escape(OWNED), Text(OWNED), Text.assemble((OWNED, "bold")), "a table"]
)
def test_unprintable_text_of_a_site_does_not_control_the_terminal(terminal, shown):
    if shown == "a table":
        shown = Table(OWNED, box=None)
        shown.add_row(OWNED)
    console.errors.print(shown, soft_wrap=True)
    assert HARMLESS in terminal.getvalue() and terminal.getvalue().replace("\n", "").isprintable()


def test_unprintable_text_in_a_log_does_not_control_the_terminal(terminal):
    record = logging.LogRecord("barnraise", logging.ERROR, "", 0, OWNED, None, None)
    TerminalLogHandler().handle(record)
    assert terminal.getvalue().replace("\n", "").isprintable()
    assert SafeFormatter().format(record).endswith("ERROR good  ]0;owned  [2J  evil")


@given(st.text())
def test_unprintable_text_of_any_kind_does_not_control_the_terminal(text):
    shown = io.StringIO()
    SafeConsole(file=shown, force_terminal=True, color_system=None).print(Text(text))
    assert not set(shown.getvalue()) & {chr(n) for n in (*range(10), *range(11, 32), 127, 155)}


def test_link_in_the_name_of_a_site_leads_nowhere():
    shown = io.StringIO()
    colours = SafeConsole(file=shown, force_terminal=True, color_system="truecolor")
    colours.print("[bold][link=https://evil.example]good[/link][/bold]")
    assert "good" in shown.getvalue() and "evil" not in shown.getvalue()


ESCAPING = ("escape", "format_duration")


def find_unescaped(path) -> list[str]:
    """Return what a module prints of a site's plain JSON, as markup of the console."""
    found = []
    for call in ast.walk(ast.parse(path.read_text())):
        is_print = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if not is_print or call.func.attr not in ("print", "add_row"):
            continue
        waiting = [*call.args]
        while waiting:
            node = waiting.pop()
            is_escaped = isinstance(node, ast.Call) and ast.unparse(node.func) in ESCAPING
            is_number = isinstance(node, ast.FormattedValue) and node.format_spec is not None
            if is_escaped or is_number:
                continue
            key = node.slice if isinstance(node, ast.Subscript) else None
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                found.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
            if isinstance(node, ast.IfExp):
                waiting += [node.body, node.orelse]
            elif isinstance(node, ast.GeneratorExp):
                waiting.append(node.elt)
            else:
                waiting += ast.iter_child_nodes(node)
    return found


def test_unprintable_or_marked_up_text_of_a_sites_json_is_escaped():
    modules = (ROOT / "worker" / "barnraise" / "cli").rglob("*.py")
    assert not [place for module in modules for place in find_unescaped(module)]
