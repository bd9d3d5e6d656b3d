"""Test what is read of a machine, with answers of each system and with this one's processes."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from barnraise.planning.limits import Limits
from barnraise.training.limits import machine_facts
from barnraise.training.limits.machine_facts import (
    FactsReader,
    LinuxFacts,
    list_running,
    open_machine_facts,
    parse_input_registry,
    parse_sessions,
    read_program,
    since_tick,
)

SESSIONS = """Type=tty
State=active
IdleHint=no
IdleSinceHint=0

Type=wayland
State=active
IdleHint=yes
IdleSinceHint=1700000000000000

Type=x11
State=closing
IdleHint=no
IdleSinceHint=0
"""
REGISTRY = """  | |   "HIDParameters" = {"HIDClickTime"=500000000}
  | |   "HIDIdleTime" = 4200000000
"""


def test_idle_time_of_login_sessions():
    assert parse_sessions(SESSIONS, 1_700_000_090.0) == 90.0
    assert parse_sessions(SESSIONS.replace("IdleHint=yes", "IdleHint=no"), 1.7e9) == 0.0
    assert parse_sessions("Type=tty\nState=active\nIdleHint=yes\n", 1.7e9) is None
    assert parse_sessions("", 0.0) is None


@pytest.mark.parametrize(
    ("environment", "idle"),
    [
        ({"DISPLAY": ":0", "XDG_SESSION_TYPE": "x11"}, 5.0),
        ({"DISPLAY": ":0", "XDG_SESSION_TYPE": "wayland"}, None),
        ({"DISPLAY": ":0", "WAYLAND_DISPLAY": "wayland-0"}, None),
        ({}, None),
    ],
)
def test_x_display_is_asked_where_it_sees_all_input(monkeypatch, environment, idle):
    for name in ("DISPLAY", "XDG_SESSION_TYPE", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine_facts, "read_x_idle_seconds", lambda: 5.0)
    monkeypatch.setattr(machine_facts, "read_program", lambda command, period: "")
    assert LinuxFacts().read_idle_seconds() == idle


def test_idle_time_of_macos_and_windows():
    assert parse_input_registry(REGISTRY) == 4.2
    assert parse_input_registry("") is None
    assert since_tick(5_000, 2_000) == 3.0
    assert since_tick(1_000, (1 << 32) - 1_000) == 2.0, "the count begins again after 49 days"


def test_program_is_started_once_in_a_period(tmp_path):
    runs = tmp_path / "runs"
    command = ("sh", "-c", f"echo run >> {runs}; wc -l < {runs}")
    answers = [read_program(command, period).strip() for period in (1, 1, 2)]
    assert answers == ["1", "1", "2"]
    assert read_program(("no-such-program-anywhere",), 1) == ""


def test_running_programs_are_found_by_name(tmp_path):
    program = tmp_path / "a-program-with-a-long-name"
    shutil.copy("/bin/sleep", program)
    names = (
        "nothing-of-this-name",
        "A-Program-With-A-Long-Name",
        "a-program-with-a-different-name",
    )
    assert list_running(names) == ()
    process = subprocess.Popen([program, "60"])
    try:
        deadline = time.monotonic() + 30
        while not (found := list_running(names)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found == ("A-Program-With-A-Long-Name",)
    finally:
        process.kill()
        process.wait()


def test_worker_does_not_pause_for_itself(tmp_path):
    python = tmp_path / "a-python-of-its-own"
    python.symlink_to(sys.executable)
    code = "from barnraise.training.limits.machine_facts import list_running; "
    code += "print(list_running(['a-python-of-its-own']))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.check_output([python, "-c", code], env=environment, text=True) == "()\n"


def test_other_programs_use_of_the_cpu_excludes_this_one():
    busy_cpu = Limits(busy_cpu=50)
    reader, later = FactsReader(), FactsReader()
    reader.read(busy_cpu)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        time.sleep(1.5)
        others = reader.read(busy_cpu).other_cpu
        busy.kill()
    assert others is not None and others > 5
    later.read(busy_cpu)
    ends = time.process_time() + 0.3
    while time.process_time() < ends:
        pass
    assert later.read(busy_cpu).other_cpu is not None


def test_own_processes_of_a_rank_include_the_others(monkeypatch):
    code = "from barnraise.training.limits.machine_facts import list_own_processes; "
    code += "print(len(list_own_processes()), flush=True); input()"
    start = f"import subprocess, sys; ranks = [subprocess.Popen([sys.executable, '-c', {code!r}], "
    start += "stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]; "
    start += "print([int(rank.stdout.readline()) for rank in ranks]); "
    start += "[rank.communicate(b'end') for rank in ranks]"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    counts = {}
    for world in ("1", "2"):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", world)
        output = subprocess.check_output([sys.executable, "-c", start], text=True)
        counts[world] = output.strip()
    assert counts == {"1": "[1, 1]", "2": "[2, 2]"}


class HeadlessFacts(LinuxFacts):
    """A machine without keyboard and mouse."""

    def read_idle_seconds(self) -> float | None:
        return None


def test_rules_that_a_machine_cannot_obey_are_named(monkeypatch):
    reader = FactsReader(HeadlessFacts())
    assert reader.explain_missing(Limits()) == ""
    sentence = reader.explain_missing(Limits(idle=5))
    assert sentence.startswith("--idle needs to see when keyboard and mouse were used last, and")
    monkeypatch.setattr(machine_facts, "read_cpu_celsius", lambda: None)
    assert "reveals no temperature" in reader.explain_missing(Limits(max_temperature=85))
    monkeypatch.setattr(machine_facts, "read_cpu_celsius", lambda: 61.0)
    assert reader.explain_missing(Limits(max_temperature=85)) == ""
    assert reader.read(Limits(max_temperature=85)).celsius == 61.0


def test_hottest_of_several_gpus_counts(monkeypatch):
    class Sensor:
        def __init__(self, index: int) -> None:
            self.index = index

        def measure(self) -> dict[str, float]:
            return {"gpu_celsius": 50.0 + 10 * self.index} if self.index else {}

    monkeypatch.setattr(machine_facts, "GpuSensor", Sensor)
    monkeypatch.setattr(machine_facts, "read_cpu_celsius", lambda: 55.0)
    for indices, celsius in (((), 55.0), ((0,), 55.0), ((0, 2, 1), 70.0)):
        assert FactsReader(HeadlessFacts(), indices).read_celsius() == celsius


def test_only_what_a_rule_needs_is_read():
    facts = FactsReader(HeadlessFacts()).read(Limits())
    assert facts.idle_seconds is facts.other_cpu is facts.celsius is None and not facts.programs


@pytest.mark.parametrize(("answer", "is_on_battery"), [(True, False), (False, True), (None, False)])
def test_battery_counts_when_it_is_known_that_no_plug_is_in(monkeypatch, answer, is_on_battery):
    battery = type("Battery", (), {"power_plugged": answer})()
    monkeypatch.setattr(machine_facts.psutil, "sensors_battery", lambda: battery, raising=False)
    assert machine_facts.is_on_battery() == is_on_battery
    monkeypatch.setattr(machine_facts.psutil, "sensors_battery", lambda: None, raising=False)
    assert not machine_facts.is_on_battery()


def test_this_system_has_a_reader():
    facts = open_machine_facts()
    idle = facts.read_idle_seconds()
    assert (idle is None and facts.no_idle_reason) or idle >= 0
