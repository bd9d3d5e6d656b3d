"""Test `barnraise status` on the status files that workers write."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from example_hardware import cpu_machine
from helpers.worker.command_line import EXCHANGE, RUN
from helpers.worker.fake_coordinator import enrol
from typer.testing import CliRunner

from barnraise.cli.main import app
from barnraise.planning.limits import Limits
from barnraise.planning.render import build_plan_view
from barnraise.planning.search import make_plan
from barnraise.spec import preset
from barnraise.state_dir import StateDir
from barnraise.training.local_control import LocalControl

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
PEERS = [
    {"key": "a" * 64, "lag": 0, "up": 50_000.0, "down": 1_500_000.0, "agrees": True},
    {"key": "b" * 64, "lag": 2, "up": 0.0, "down": 0.0, "agrees": False},
]


@pytest.fixture
def home(tmp_path, monkeypatch) -> StateDir:
    """Return a new state directory."""
    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    return StateDir(tmp_path)


@pytest.fixture
def folder(home):
    """Yield the open folder of a run, in which this process is the worker."""
    opened = home.open_run(RUN)
    LocalControl(opened.path).register_worker()
    yield opened
    opened.close()


def show_status(*options: str) -> str:
    """Run `barnraise status` in this process and return its output."""
    result = CliRunner().invoke(app, ["status", *options])
    assert result.exit_code == 0, result.output
    return result.output


def write_status(path: Path, **changes) -> None:
    (path / "status.json").write_text(json.dumps(STATUS | {"at": time.time()} | changes))


def test_status_without_runs_names_the_next_command(home):
    assert "run `barnraise login URL` first" in show_status()
    enrol(home, "http://s", home.identity.key, RUN)
    assert "has not trained yet: barnraise join RUN" in show_status()


@pytest.mark.parametrize("content", ["", '{"name":'])
def test_status_file_that_a_crash_cut_off_shows_the_run_without_it(folder, content):
    (folder.path / "status.json").write_text(content)
    assert "not trained yet" in show_status()
    assert show_status("--json").strip() == "[]"


def test_status_shows_the_exchange_and_each_peer(folder):
    write_status(folder.path, exchange=EXCHANGE, neighbours=PEERS)
    output = show_status()
    assert "Ridge  training" in output and "running" in output
    assert "12 steps, 4.01 bits a parameter, 25 % of the uplink" in output
    assert "50 kB/s up, 1.5 MB/s down" in output and "3 behind" in output
    rows = [line.split() for line in output.splitlines()]
    assert ["aaaaaaaa", "0", "50", "kB/s", "1.5", "MB/s", "yes"] in rows
    assert ["bbbbbbbb", "2", "0", "kB/s", "0", "kB/s", "NO"] in rows


def test_status_names_all_cards_of_a_worker(folder):
    hardware = cpu_machine(name="RTX 4090")
    hardware = replace(hardware, others=(hardware,))
    plan = make_plan(hardware, preset("gpt-nano"), Limits(device_memory=10**9), step_sequences=8)
    view = build_plan_view(plan, hardware).model_dump(mode="json")
    write_status(folder.path, plan=view, device="cuda, cuda:1")
    assert "Cards      2 × RTX 4090: cuda, cuda:1" in show_status()
    write_status(folder.path, plan=view, device="cuda")
    assert "Cards" not in show_status()


def test_status_of_a_worker_that_ended_shows_nothing_of_now(folder):
    write_status(folder.path, exchange=EXCHANGE, neighbours=PEERS, at=time.time() - 7200)
    folder.close()
    output = show_status()
    assert "Ridge  stopped" in output and "0 tokens/s" in output
    assert f"stopped 2 h 00 min ago; barnraise join {RUN}" in output
    assert "aaaaaaaa" not in output
    write_status(folder.path, activity="finished")
    assert f"barnraise export {RUN} FOLDER" in show_status()


def test_status_shows_a_whole_warning_while_the_worker_runs(folder):
    warning = "trains alone: " + ", ".join(f"cause {number}" for number in range(40))
    write_status(folder.path, warning=warning)
    assert warning in " ".join(show_status().split())
    folder.close()
    assert "trains alone" not in show_status()


def test_status_counts_how_often_memory_ran_short(folder):
    write_status(folder.path, memory_shortages=2)
    assert "memory ran short 2 times, and the plan was made smaller" in show_status()


def test_status_of_an_older_version_is_shown(folder):
    (folder.path / "status.json").write_text(json.dumps(STATUS))
    assert "Ridge" in show_status()


def test_status_for_programs_says_what_runs_and_what_space_it_takes(folder):
    write_status(folder.path)
    (shown,) = json.loads(show_status("--json"))
    assert shown["running"] is True and shown["disk_bytes"] > 0 and shown["step"] == 7


def test_status_says_why_a_machine_waits_for_a_second_volunteer(folder):
    reason = "only one volunteer is connected: waiting for a second one"
    write_status(folder.path, waiting=reason)
    assert reason in show_status()
