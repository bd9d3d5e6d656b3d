"""Test `barnraise status` on the status files that workers write."""

import json
from pathlib import Path

import pytest
from helpers.command_line import RUN, run_barnraise

from barnraise.protocol.coordinator_messages import MirrorView
from barnraise.state_dir import RunDir, SiteMembership, StateDir

STATUS = {
    "name": "Ridge",
    "activity": "training",
    "step": 7,
    "loss": 2.5,
    "rate": 100.0,
    "updates_sent": 3,
    "updates_received": 4,
    "peers": 2,
    "ledger_tokens": 50,
    "token_budget": 100,
}
EXCHANGE = {
    "round_steps": 12,
    "scheme": "dense4",
    "density": 1.0,
    "bits_per_parameter": 4.01,
    "sent_rate": 50_000.0,
    "received_rate": 1_500_000.0,
    "uplink_rate": 200_000.0,
    "lag": 3,
}
PEERS = [
    {"key": "a" * 64, "lag": 0, "up": 50_000.0, "down": 1_500_000.0, "agrees": True},
    {"key": "b" * 64, "lag": 2, "up": 0.0, "down": 0.0, "agrees": False},
]


@pytest.fixture
def status_file(tmp_path) -> Path:
    """Return the path of a run's status file; the run's folder exists."""
    RunDir(tmp_path / "runs" / RUN, RUN, StateDir(tmp_path).identity.key).close()
    return tmp_path / "runs" / RUN / "status.json"


def test_status_without_runs_names_the_next_command(tmp_path):
    assert "run `barnraise login URL` first" in run_barnraise(tmp_path, "status").stdout
    mirror = MirrorView(key=StateDir(tmp_path).identity.key, name="s", protocols=[1], time=0)
    StateDir(tmp_path).save_membership(SiteMembership(url="http://s", mirror=mirror, machine=RUN))
    output = run_barnraise(tmp_path, "status").stdout
    assert "has not trained yet: barnraise join RUN" in output


def test_status_file_that_a_crash_cut_off_is_skipped(tmp_path, status_file):
    status_file.write_text("")
    result = run_barnraise(tmp_path, "status")
    assert result.returncode == 0 and "not enrolled yet" in result.stdout
    assert run_barnraise(tmp_path, "status", "--json").stdout.strip() == "[]"


def test_status_shows_the_exchange_and_each_peer(tmp_path, status_file):
    status_file.write_text(json.dumps(STATUS | {"exchange": EXCHANGE, "neighbours": PEERS}))
    output = run_barnraise(tmp_path, "status").stdout
    assert "12 steps a round, 4.01 bits" in output
    assert "50 kB/s up (25% of the line)" in output and "3 behind" in output
    rows = [line.split() for line in output.splitlines()]
    assert ["aaaaaaaa", "0", "50", "kB/s", "1.5", "MB/s", "yes"] in rows
    assert ["bbbbbbbb", "2", "0", "kB/s", "0", "kB/s", "NO"] in rows


def test_status_of_an_older_version_is_shown(tmp_path, status_file):
    status_file.write_text(json.dumps(STATUS))
    result = run_barnraise(tmp_path, "status")
    assert result.returncode == 0 and "Ridge" in result.stdout


def test_status_says_why_a_machine_waits_for_a_second_volunteer(tmp_path, status_file):
    reason = "only one volunteer is connected: waiting for a second one"
    status_file.write_text(json.dumps({**STATUS, "waiting": reason}))
    assert reason in run_barnraise(tmp_path, "status").stdout
