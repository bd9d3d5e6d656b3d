"""Install, start, stop and remove a service with what the system has for this."""

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from barnraise.cli.service.service_texts import (
    ServiceText,
    render_launchd_agent,
    render_scheduled_task,
    render_systemd_unit,
)
from barnraise.durable_io import write_atomically
from barnraise.errors import StateError
from barnraise.state_dir import StateDir

SYSTEM_UNITS = Path("/etc/systemd/system")
CALL_SECONDS = 60.0  # for one command of the system: stopping waits until the worker has left
RUNNING_STATES = ("active", "activating", "reloading", "deactivating", "running")
Command = tuple[str, ...]


@dataclass(frozen=True)
class ServiceState:
    """What the system says of a service."""

    is_installed: bool  # whether the system knows it
    is_running: bool = False
    has_failed: bool = False  # whether the system has given up starting it


@dataclass(frozen=True)
class ServiceManager:
    """The system's service manager, for one service.

    Methods raise StateError with the system's own words when it refuses.
    """

    path: Path  # the file that describes the service to the system
    render: Callable[[ServiceText], bytes]  # writes that file
    state: Command  # shows the service; it fails where there is none
    start: tuple[Command, ...]  # install the service and start it
    stop: tuple[Command, ...]  # stop and remove it, before the file is deleted
    forget: tuple[Command, ...] = ()  # after that; they may fail
    lists_missing: bool = False  # whether `state` also answers where there is no such service
    place: str = ""  # where the system has the service
    starts: str = "when you log in"
    linger_sentence: str = ""  # how to start it before its person logs in

    def install(self, service: ServiceText) -> None:
        """Install the service and start it. Its file may hold a proxy's password."""
        write_atomically(self.path, self.render(service), private=True)
        for command in self.start:
            call_system(*command)

    def remove(self) -> None:
        """Stop the service and remove it; nothing of it is left."""
        if self.read_state().is_installed:
            for command in self.stop:
                call_system(*command)
        self.path.unlink(missing_ok=True)
        for command in self.forget:
            with contextlib.suppress(StateError):
                call_system(*command)

    def read_state(self) -> ServiceState:
        """Return what the system says of the service."""
        try:
            return parse_state(call_system(*self.state))
        except StateError:
            if self.lists_missing:
                raise
            return ServiceState(is_installed=False)

    def read_text(self) -> str:
        """Return the file that describes the service."""
        return self.path.read_bytes().replace(b"\0", b"").decode(errors="replace")  # UTF-16 too

    @property
    def is_reachable(self) -> bool:
        """Return whether the service manager answers."""
        try:
            self.read_state()
        except StateError:
            return False
        return True


def parse_state(text: str) -> ServiceState:
    """Read what `systemctl show` or `launchctl print` prints. Pure.

    Windows' Task Scheduler answers in the user's language: it shows only that there is a task.
    """
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition("=")
        values.setdefault(name.strip(), value.strip())
    state = values.get("ActiveState") or values.get("state", "")
    is_running = state in RUNNING_STATES
    has_exit_code = values.get("last exit code", "0") != "0"
    return ServiceState(
        is_installed=values.get("LoadState", "loaded") == "loaded",
        is_running=is_running,
        has_failed=state == "failed" or (has_exit_code and not is_running),
    )


def call_system(*command: str) -> str:
    """Run a command of the system and return what it prints.

    Raises:
        StateError: it fails, with what it says; or it is missing, or does not end.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=CALL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StateError(f"`{' '.join(command)}` failed: {error}") from None
    if done.returncode:
        reason = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise StateError(f"`{' '.join(command)}` failed: {reason}")
    return done.stdout


def choose_service_name(folder: Path) -> str:
    """Return the service's name for a state directory: each may have a service of its own."""
    if folder.resolve() == (Path.home() / StateDir.DEFAULT_NAME).resolve():
        return "barnraise"
    return f"barnraise-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}"


def choose_manager(
    folder: Path, system: str = sys.platform, *, is_system: bool = False
) -> ServiceManager:
    """Return the service manager for a state directory.

    Args:
        folder: the state directory.
        system: as `sys.platform` names it.
        is_system: whether it is a service of the whole machine, which only systemd has.
    """
    name = choose_service_name(folder)
    if system == "darwin":
        return _describe_launchd(f"org.barnraise.{name}")
    if system == "win32":
        return _describe_task_scheduler(name, folder / "service.xml")
    return _describe_systemd(f"{name}.service", is_system)


def _describe_systemd(unit: str, is_system: bool) -> ServiceManager:
    configuration = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = (SYSTEM_UNITS if is_system else configuration / "systemd" / "user") / unit
    call: Command = ("systemctl",) if is_system else ("systemctl", "--user")
    linger = "To start it with the machine, before anybody logs in: loginctl enable-linger"
    return ServiceManager(
        path=path,
        render=render_systemd_unit,
        state=(*call, "show", "--property=LoadState,ActiveState", unit),
        start=((*call, "daemon-reload"), (*call, "enable", "--now", unit)),
        stop=((*call, "disable", "--now", unit),),
        forget=((*call, "daemon-reload"), (*call, "reset-failed", unit)),
        lists_missing=True,
        place=str(path),
        starts="with this machine" if is_system else "when you log in",
        linger_sentence="" if is_system else linger,
    )


def _describe_launchd(label: str) -> ServiceManager:
    path = Path.home() / "Library" / "LaunchAgents" / f"{label}.plist"
    domain = f"gui/{os.getuid()}" if sys.platform != "win32" else ""
    return ServiceManager(
        path=path,
        render=render_launchd_agent,
        state=("launchctl", "print", f"{domain}/{label}"),
        start=(("launchctl", "bootstrap", domain, str(path)),),
        stop=(("launchctl", "bootout", f"{domain}/{label}"),),
        place=str(path),
    )


def _describe_task_scheduler(name: str, path: Path) -> ServiceManager:
    """Return Windows' own, which ends no worker: the caller has let it leave."""
    task = ("/TN", name)
    return ServiceManager(
        path=path,
        render=render_scheduled_task,
        state=("schtasks", "/Query", *task),
        start=(
            ("schtasks", "/Create", *task, "/XML", str(path), "/F"),
            ("schtasks", "/Run", *task),
        ),
        stop=(("schtasks", "/Delete", *task, "/F"),),
        place=f"task {name} of the Task Scheduler",
    )
