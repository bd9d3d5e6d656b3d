"""Install a real service, kill its worker, and see it return, with a user's systemd."""

import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from helpers.worker.command_line import run_barnraise
from helpers.worker.training_site import TrainingSite
from helpers.worker.user_session import can_start_session, run_in_session

from barnraise.cli.service.command import SYSTEMD_MARK
from barnraise.cli.service.managers import choose_manager, choose_service_name
from barnraise.planning.limits import Limits
from barnraise.state_dir import StateDir
from barnraise.training.local_control import find_other_worker

PATIENCE_SECONDS = 300.0  # other programs may use the machine


@dataclass(frozen=True)
class ServiceReturn:
    """What the drill has seen.

    Attributes:
        returned_seconds: from the kill until another worker trains.
        was_niced: whether the worker ran with a low priority.
        ended_in_order: whether the worker left by itself when the service was removed.
        files_left: of the service, after it was removed.
    """

    returned_seconds: float
    was_niced: bool
    ended_in_order: bool
    files_left: list[str]


def can_run_services() -> bool:
    """Return whether a service of a user can be installed here, or in a session of its own."""
    return _has_user_systemd() or can_start_session()


def _has_user_systemd() -> bool:
    if sys.platform != "linux" or os.geteuid() == 0 or not SYSTEMD_MARK.is_dir():
        return False
    return choose_manager(Path()).is_reachable


def drill_service() -> ServiceReturn:
    """Install a service, let it train, kill it, see it return, and remove it."""
    if not _has_user_systemd():
        return _drill_in_session()
    # A folder in memory, as /tmp often is, would be refused: it is empty after a start.
    with tempfile.TemporaryDirectory(prefix=".barnraise-drill-", dir=Path.home()) as folder:
        home = StateDir(Path(folder))
        with closing(TrainingSite(home)) as site:
            return _drill(home, site)


def _drill_in_session() -> ServiceReturn:
    """Run the drill in a session of an ordinary user, with a systemd of its own."""
    code = f"import sys; sys.path[:] = {sys.path}; from {__name__} import main; main()"
    done = run_in_session([sys.executable, "-c", code], 3 * PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return ServiceReturn(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Print what the drill has seen."""
    print(json.dumps(dataclasses.asdict(drill_service())))


def _drill(home: StateDir, site: TrainingSite) -> ServiceReturn:
    home.limits = Limits(threads=1)
    installed = run_barnraise(home.path, "service", "install", "one")
    assert installed.returncode == 0, installed.stderr
    name = choose_service_name(home.path)
    manager = choose_manager(home.path)
    try:
        _wait_until(lambda: site.is_training("one"), "the service trains")
        before = find_other_worker(home.run_folders())
        assert before is not None and manager.read_state().is_running
        niceness = os.getpriority(os.PRIO_PROCESS, before.pid)
        session = site.sessions["one"]
        started = time.monotonic()
        os.kill(before.pid, signal.SIGKILL)
        _wait_until(lambda: site.is_training("one", session), "another worker trains")
        seconds = time.monotonic() - started
        assert manager.read_state().is_running
        assert find_other_worker(home.run_folders()) not in (None, before)
    finally:
        removed = run_barnraise(home.path, "service", "remove")
    assert removed.returncode == 0, removed.stderr
    assert not manager.read_state().is_installed
    units = Path(manager.place).parent.rglob(f"{name}*")
    return ServiceReturn(
        returned_seconds=seconds,
        was_niced=niceness == 19,
        ended_in_order=site.last_reports["one"].activity == "left",
        files_left=[str(path) for path in (*units, *home.path.glob("service*"))],
    )


def _wait_until(condition: Callable[[], bool], description: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_SECONDS:.0f} s: {description}"
        time.sleep(0.1)
