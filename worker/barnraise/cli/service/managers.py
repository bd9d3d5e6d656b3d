"""Install, start, stop and remove a service with what the system has for this."""

import os
import subprocess
import sys
from abc import ABC, abstractmethod
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

SYSTEM_UNITS = Path("/etc/systemd/system")
CALL_SECONDS = 60.0  # for one command of the system: stopping waits until the worker has left


@dataclass(frozen=True)
class ServiceState:
    """What the system says of a service.

    Attributes:
        is_installed: whether the system knows it.
        is_running: whether its worker runs.
        has_failed: whether the system has given up starting it.
        pid: the worker's process; 0 without one, or where the system does not name it.
    """

    is_installed: bool
    is_running: bool = False
    has_failed: bool = False
    pid: int = 0


class ServiceManager(ABC):
    """The system's service manager, for one service.

    Methods raise StateError with the system's own words when it refuses.
    """

    start_sentence = "It starts when you log in."
    linger_sentence = ""  # how to start before that

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    @abstractmethod
    def place(self) -> str:
        """Return where the system has the service."""

    @abstractmethod
    def install(self, service: ServiceText) -> None:
        """Install the service and start it."""

    @abstractmethod
    def remove(self) -> None:
        """Stop the service and remove it; nothing of it is left."""

    @abstractmethod
    def read_state(self) -> ServiceState:
        """Return what the system says of the service."""


class SystemdManager(ServiceManager):
    """systemd: the one of the user, or that of the system."""

    def __init__(self, name: str, *, is_system: bool = False) -> None:
        super().__init__(name)
        self._is_system = is_system
        if is_system:
            self.start_sentence = "It starts with this machine."
        else:
            self.linger_sentence = (
                "To start it with the machine, before anybody logs in: loginctl enable-linger"
            )

    @property
    def _unit_path(self) -> Path:
        if self._is_system:
            return SYSTEM_UNITS / f"{self.name}.service"
        configuration = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        return Path(configuration) / "systemd" / "user" / f"{self.name}.service"

    @property
    def place(self) -> str:
        """Return the unit's file."""
        return str(self._unit_path)

    @property
    def is_reachable(self) -> bool:
        """Return whether this systemd answers."""
        try:
            self._call("show", "--property=Version")
        except StateError:
            return False
        return True

    def install(self, service: ServiceText) -> None:
        """Write the unit, which may hold a proxy's password, enable and start it."""
        write_atomically(self._unit_path, render_systemd_unit(service).encode(), private=True)
        self._call("daemon-reload")
        self._call("enable", "--now", self._unit_path.name)

    def remove(self) -> None:
        """Stop and disable the unit, and delete its file."""
        if self._unit_path.exists():
            self._call("disable", "--now", self._unit_path.name)
            self._unit_path.unlink()
        self._call("daemon-reload")
        subprocess.run(self._command("reset-failed", self._unit_path.name), capture_output=True)

    def read_state(self) -> ServiceState:
        """Return the unit's state."""
        properties = "LoadState,ActiveState,MainPID"
        answer = self._call("show", f"--property={properties}", self._unit_path.name)
        return parse_systemd_state(answer)

    def _command(self, *arguments: str) -> list[str]:
        return ["systemctl", *([] if self._is_system else ["--user"]), *arguments]

    def _call(self, *arguments: str) -> str:
        return call_system(*self._command(*arguments))


def parse_systemd_state(text: str) -> ServiceState:
    """Read what `systemctl show` prints. Pure."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    active = values.get("ActiveState", "")
    pid = values.get("MainPID", "0")
    return ServiceState(
        is_installed=values.get("LoadState") == "loaded",
        is_running=active in ("active", "activating", "reloading", "deactivating"),
        has_failed=active == "failed",
        pid=int(pid) if pid.isdecimal() else 0,
    )


class LaunchdManager(ServiceManager):
    """An agent of launchd, which macOS starts when its person logs in."""

    @property
    def _label(self) -> str:
        return f"org.barnraise.{self.name}"

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}" if sys.platform != "win32" else ""

    @property
    def _path(self) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"{self._label}.plist"

    @property
    def place(self) -> str:
        """Return the agent's property list."""
        return str(self._path)

    def install(self, service: ServiceText) -> None:
        """Write the property list and let launchd load it, which starts the worker."""
        write_atomically(self._path, render_launchd_agent(service), private=True)
        call_system("launchctl", "bootstrap", self._domain, str(self._path))

    def remove(self) -> None:
        """Unload the agent, which stops the worker, and delete the property list."""
        if self.read_state().is_installed:
            call_system("launchctl", "bootout", f"{self._domain}/{self._label}")
        self._path.unlink(missing_ok=True)

    def read_state(self) -> ServiceState:
        """Return the agent's state."""
        try:
            answer = call_system("launchctl", "print", f"{self._domain}/{self._label}")
        except StateError:
            return ServiceState(is_installed=False)
        return parse_launchd_state(answer)


def parse_launchd_state(text: str) -> ServiceState:
    """Read what `launchctl print` prints. Pure."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.strip().partition(" = ")
        if equals:
            values.setdefault(name, value)
    pid = values.get("pid", "0")
    return ServiceState(
        is_installed=True,
        is_running=values.get("state") == "running",
        has_failed=values.get("state") != "running" and values.get("last exit code", "0") != "0",
        pid=int(pid) if pid.isdecimal() else 0,
    )


class TaskManager(ServiceManager):
    """Windows' Task Scheduler. It names no process, and its answers are in the user's language."""

    def __init__(self, name: str, folder: Path) -> None:
        """Manage the task of this name; its text lies in `folder` while it is created."""
        super().__init__(name)
        self._folder = folder

    @property
    def place(self) -> str:
        """Return the task's name."""
        return f"task {self.name} of the Task Scheduler"

    def install(self, service: ServiceText) -> None:
        """Create the task and run it."""
        path = self._folder / "service.xml"
        path.write_text(render_scheduled_task(service), "utf-16")
        try:
            call_system("schtasks", "/Create", "/TN", self.name, "/XML", str(path), "/F")
        finally:
            path.unlink()
        call_system("schtasks", "/Run", "/TN", self.name)

    def remove(self) -> None:
        """End and delete the task. The caller has let the worker leave, as ending kills it."""
        if self.read_state().is_installed:
            subprocess.run(["schtasks", "/End", "/TN", self.name], capture_output=True)
            call_system("schtasks", "/Delete", "/TN", self.name, "/F")

    def read_state(self) -> ServiceState:
        """Return whether there is such a task."""
        try:
            call_system("schtasks", "/Query", "/TN", self.name)
        except StateError:
            return ServiceState(is_installed=False)
        return ServiceState(is_installed=True)


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


def choose_manager(name: str, folder: Path, *, is_system: bool) -> ServiceManager:
    """Return the service manager of this system for the service of this name."""
    if sys.platform == "darwin":
        return LaunchdManager(name)
    if sys.platform == "win32":
        return TaskManager(name, folder)
    return SystemdManager(name, is_system=is_system)
