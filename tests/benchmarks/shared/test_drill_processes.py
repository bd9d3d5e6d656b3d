"""Test what all drills share: their clock, and that no process outlives them."""

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from helpers.drill_modules import import_drill_module
from helpers.paths import ROOT
from helpers.wait_for import wait_until

available_clock = import_drill_module("available_clock")
child_processes = import_drill_module("child_processes")
own_processes = import_drill_module("own_processes")
ChildStatus = child_processes.ChildStatus
Progress = child_processes.Progress

SLEEP = "import time; time.sleep(600)"
# A drill that starts a child, and one that detaches itself and starts another.
DRILL = f"""
    import subprocess, sys, time
    from contextlib import ExitStack
    from pathlib import Path

    sys.path.append({str(ROOT / "benchmarks" / "shared")!r})
    from child_processes import ChildProcesses, ChildStatus

    folder = Path(sys.argv[1])
    sleep = [sys.executable, "-c", {SLEEP!r}]
    detached = f"import subprocess; subprocess.Popen({{sleep!r}}, start_new_session=True)"
    with ExitStack() as cleanup:
        cleanup.callback(print, "cleaned up")
        children = ChildProcesses(folder, cleanup)
        child = subprocess.Popen(sleep, start_new_session=True)
        subprocess.run([sys.executable, "-c", detached], check=True)
        (folder / "child.log").write_text("a last line")
        children.watch(lambda: [ChildStatus("the child", child.poll(), folder / "child.log")])
        print("started", flush=True)
        exec(sys.argv[2])
        children.wait_until(lambda: False, "the end", 600)
"""


class FakeTime:
    """A clock and sleeps that let no time pass."""

    def __init__(self, monkeypatch):
        self.seconds = 0.0
        self.share = 1.0
        monkeypatch.setattr(child_processes.time, "sleep", self.sleep)

    def now(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds


@pytest.fixture
def children(tmp_path, monkeypatch):
    monkeypatch.setenv(own_processes.VARIABLE, "")
    with ExitStack() as cleanup:
        watched = child_processes.ChildProcesses(tmp_path, cleanup)
        yield watched


def start_drill(folder, failure=""):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRILL), str(folder), failure],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def find_processes(folder):
    """Find the processes that a drill in a folder has left."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in process.environ().get(own_processes.VARIABLE, ""):
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("foreign", "share"),
    [(0.0, 1.0), (-0.1, 1.0), (1.0, 0.75), (2.0, 0.5), (9.0, available_clock.MIN_SHARE)],
)
def test_share_is_what_other_programs_leave(foreign, share):
    assert available_clock.compute_share(foreign, seconds=2.0, cores=2) == share


def test_clock_never_goes_back(monkeypatch):
    monkeypatch.setattr(available_clock, "MIN_SAMPLE_SECONDS", 0.0)
    clock = available_clock.AvailableClock(lambda: 0.0)
    readings = [clock.now() for _ in range(50)]
    assert readings == sorted(readings)


def test_wait_ends_when_the_event_has_happened(children):
    answers = iter([False, True])
    assert children.wait_until(lambda: next(answers), "an event", 60) < 60


def test_wait_goes_on_until_enough_work_is_done(children, monkeypatch):
    clock = children.clock = FakeTime(monkeypatch)
    with pytest.raises(child_processes.OverdueError):
        children.wait_until(lambda: False, "the end", 60, Progress(lambda: clock.now() / 100, 5.0))
    assert 499 < clock.now() < 501


def test_wait_without_any_progress_is_overdue(children, monkeypatch):
    clock = children.clock = FakeTime(monkeypatch)
    with pytest.raises(child_processes.OverdueError):
        children.wait_until(lambda: False, "the end", 60, Progress(lambda: 3.0, 5.0))
    assert clock.now() < 61


def test_wait_names_the_process_that_died_and_its_last_lines(children, tmp_path):
    log = tmp_path / "log"
    log.write_text("first\n" * 100 + "a last line\n")
    children.watch(lambda: [ChildStatus("north", -signal.SIGKILL, log)])
    with pytest.raises(child_processes.ChildDiedError) as caught:
        children.wait_until(lambda: False, "the end", 60)
    assert "north has died (signal SIGKILL)" in str(caught.value)
    assert str(caught.value).endswith("a last line")
    assert str(caught.value).count("first") == child_processes.LOG_LINES - 1


def test_process_that_may_finish_has_died_only_with_an_error(tmp_path):
    assert not ChildStatus("a login", 0, tmp_path, may_finish=True).has_died
    assert ChildStatus("a login", 1, tmp_path, may_finish=True).has_died
    assert ChildStatus("a server", 0, tmp_path).has_died
    assert not ChildStatus("a server", None, tmp_path).has_died


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_drill_with_all_its_processes(tmp_path, number):
    drill = start_drill(tmp_path)
    assert drill.stdout.readline() == "started\n"
    assert len(find_processes(tmp_path)) == 2
    for _ in range(2):  # `timeout` signals a process and its group
        os.kill(drill.pid, number)
    output, errors = drill.communicate(timeout=60)
    assert drill.returncode == 128 + number
    assert "cleaned up" in output and "stopped by" in errors
    assert not find_processes(tmp_path)


@pytest.mark.slow
def test_signal_ends_the_drill_of_mirrors_with_servers_and_networks(public_folder):
    """It has started three sites by then, each with Postgres, in networks of their own."""
    script = ROOT / "benchmarks" / "mirrors" / "drill_mirrors.py"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT / 'worker'}"}
    drill = subprocess.Popen(
        [sys.executable, str(script), "--quick", "--keep", str(public_folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: len(list(public_folder.glob("*/servers.json"))) == 3, 600)
    for _ in range(2):
        drill.send_signal(signal.SIGTERM)
    output, errors = drill.communicate(timeout=600)
    assert drill.returncode == 128 + signal.SIGTERM, output + errors
    assert not find_processes(public_folder)
    working_there = [
        p for p in psutil.process_iter(["cwd"]) if str(public_folder) in str(p.info["cwd"])
    ]
    assert not working_there
    mounted = [part.mountpoint for part in psutil.disk_partitions(all=True)]
    assert not [point for point in mounted if point.startswith(str(public_folder))]
    interfaces = [name for name in psutil.net_if_addrs() if name.startswith(f"bm{drill.pid}")]
    namespaces = Path("/run/netns")
    assert not interfaces and not list(namespaces.glob(f"bm{drill.pid}*"))


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("raise ValueError('a mistake')", "ValueError: a mistake"),
        ("child.kill()", "the child has died (signal SIGKILL)"),
        ("child.kill(); child.wait(); raise ValueError('its own death')", "a last line"),
    ],
)
def test_failure_ends_a_drill_with_all_its_processes(tmp_path, failure, message):
    drill = start_drill(tmp_path, failure)
    output, errors = drill.communicate(timeout=60)
    assert drill.returncode == 1
    assert message in errors and "cleaned up" in output
    wait_until(lambda: not find_processes(tmp_path))
