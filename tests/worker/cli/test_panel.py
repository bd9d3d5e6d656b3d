"""Test the six lines and the log line that show a worker's status."""

import math

import pytest
from helpers.worker.command_line import EXCHANGE
from rich.cells import cell_len

from barnraise.cli.panel import build_panel, draw_sparkline, format_status_line
from barnraise.training.local_status import LocalStatus

WRITTEN = {
    "name": "Letters A",
    "activity": "training",
    "step": 1234,
    "loss": 2.6624,
    "rate": 1234.5,
    "updates_sent": 12,
    "updates_received": 34,
    "peers": 2,
    "ledger_tokens": 3_100_000,
    "token_budget": 5_000_000,
    "tokens": 1_200_000,
    "validation_last": [3_000_000, 2.7101],
    "losses": [7 * math.exp(-i / 20) + 2.5 for i in range(64)],
    "run_rate": 3500.0,
    "exchange": {**EXCHANGE, "sent_rate": 120e3, "received_rate": 300e3, "lag": 3},
}
NEW = {"loss": None, "losses": [], "rate": 0.0, "run_rate": None, "tokens": 0, "exchange": None}
OLDER = {key: WRITTEN[key] for key in WRITTEN if key not in ("losses", "run_rate", "exchange")}
KEYS = "p pause  q stop"


def show(**changes: object) -> LocalStatus:
    """Return the status as written, with changes."""
    return LocalStatus.model_validate(WRITTEN | changes)


STATUS = show()
VARIANTS = {
    "training": STATUS,
    "long name": show(name="雪" * 40),
    "new": show(**NEW, activity="preparing", waiting="only one volunteer " * 9),
    "warning": show(warning="trains alone " * 20),
    "older": LocalStatus.model_validate(OLDER),
}


@pytest.mark.parametrize("width", [110, 80, 60, 30, 12])
@pytest.mark.parametrize("variant", VARIANTS)
def test_panel_has_six_lines_that_fit_the_terminal(variant, width):
    lines = build_panel(VARIANTS[variant], "4 GB RAM", KEYS, width).plain.split("\n")
    assert len(lines) == 6
    assert max(map(cell_len, lines)) <= width, lines


def test_panel_of_sixty_columns_shows_everything():
    text = build_panel(STATUS, "4 GB RAM", KEYS, 60).plain
    for shown in (
        *("Letters A", "training", "62 %", "2.662", "█", "validation 2.710"),
        *("1,234 tokens/s", "38 % of the run's", "about 9 min", "3.10 M of 5.00 M tokens"),
        *("↑120 kB/s ↓300 kB/s", "12 sent, 34 received", "4 GB RAM", KEYS),
    ):
        assert shown in text, text
    assert "…" not in text


def test_panel_says_why_the_worker_waits_instead_of_its_limits():
    paused = show(activity="paused", reason="paused on this machine")
    last_line = build_panel(paused, "4 GB RAM", "r resume  q stop", 60).plain.split("\n")[-1]
    assert "paused on this machine" in last_line and last_line.endswith("r resume  q stop")
    assert "4 GB" not in last_line
    assert "(paused on this machine)" in format_status_line(paused)


def test_panel_shows_what_is_wrong_while_the_worker_trains():
    warning = "trains alone: its neighbours (c0ffee00) have averaged " * 3
    lonely = show(warning=warning)
    last_line = build_panel(lonely, "4 GB RAM", KEYS, 60).plain.split("\n")[-1]
    assert last_line.startswith("Warning") and "c0ffee00" in last_line and KEYS not in last_line
    assert "(trains alone" in format_status_line(lonely)
    paused = show(warning=warning, reason="paused on this machine")
    assert "paused on this machine" in build_panel(paused, "", "", 60).plain


def test_panel_on_a_terminal_without_unicode_is_ascii():
    drawn = build_panel(show(exchange=None), "", "", 60, is_ascii=True).plain
    assert {c for c in drawn if not c.isascii()} <= {"·"}


def test_time_left_follows_the_speed_of_all_machines_and_not_of_one():
    own_only = show(run_rate=None)
    assert "about 9 min" in build_panel(STATUS, "", "", 80).plain
    assert "about 26 min" in build_panel(own_only, "", "", 80).plain
    over = show(ledger_tokens=6_000_000)
    assert "none · 5.00 M of 5.00 M" in build_panel(over, "", "", 80).plain


def test_sparkline_shows_the_course_whatever_its_width():
    assert draw_sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert draw_sparkline([8] * 50 + [1] * 50, 2) == "█▁"
    assert draw_sparkline([2.0, 2.0], 9) == "▁▁"
    assert draw_sparkline([], 9) == draw_sparkline([1.0], 0) == ""
