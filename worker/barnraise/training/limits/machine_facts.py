"""Read what a machine is like: idle time, battery, other programs, temperature.

One class for each system behind the protocol `SystemFacts`. Only what a rule needs is read.
"""

import ctypes
import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import psutil

from barnraise.coordinator_client.machine_monitor import GpuSensor, read_cpu_celsius
from barnraise.planning.limits import Limits
from barnraise.swap.sharded.torchrun import count_ranks
from barnraise.training.limits.decision import Facts

CPU_READINGS = 5  # over which the use of the CPU is averaged
PROGRAM_SECONDS = 10.0  # between two starts of a program, whose answer changes slowly
PROGRAM_LIMIT_SECONDS = 5.0  # for such a program


class SystemFacts(Protocol):
    """What a system reveals of the machine."""

    no_idle_reason: str  # why no idle time is revealed, as a part of a sentence

    def read_idle_seconds(self) -> float | None:
        """Return the seconds since somebody used keyboard or mouse; None: it is not revealed."""
        ...


class LinuxFacts:
    """Linux: X11's screen saver extension, or what logind knows of a graphical session."""

    no_idle_reason = "there is no X display here, and logind knows no graphical session"

    def read_idle_seconds(self) -> float | None:
        """Return the seconds since the last input; see `SystemFacts`."""
        idle = None
        # Wayland's own X display sees the input of its programs alone.
        is_wayland = os.environ.get("XDG_SESSION_TYPE") == "wayland"
        if os.environ.get("DISPLAY") and not (is_wayland or os.environ.get("WAYLAND_DISPLAY")):
            idle = read_x_idle_seconds()
        if idle is None:
            idle = parse_sessions(_read_program(SESSIONS_COMMAND), time.time())
        return idle


# All sessions with their properties, one block of lines for each.
SESSIONS_COMMAND = (
    "sh",
    "-c",
    "loginctl list-sessions --no-legend | while read -r id rest; do "
    'loginctl show-session "$id" -p Type -p State -p IdleHint -p IdleSinceHint; echo; done',
)


def parse_sessions(text: str, now: float) -> float | None:
    """Return the idle seconds of the graphical session that was used last, from loginctl's answer.

    Returns:
        None where there is no graphical session.
    """
    idle: list[float] = []
    for block in text.split("\n\n"):
        fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if fields.get("Type") not in ("x11", "wayland", "mir") or fields.get("State") == "closing":
            continue
        since = fields.get("IdleSinceHint", "0")
        is_idle = fields.get("IdleHint") == "yes" and since.isdigit() and since != "0"
        idle.append(max(0.0, now - int(since) / 1e6) if is_idle else 0.0)
    return min(idle, default=None)


class _XScreenSaverInfo(ctypes.Structure):
    _fields_ = [
        ("window", ctypes.c_ulong),
        ("state", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("since", ctypes.c_ulong),
        ("idle", ctypes.c_ulong),
        ("event_mask", ctypes.c_ulong),
    ]


def read_x_idle_seconds() -> float | None:
    """Return the idle seconds of this session's X display, by the extension MIT-SCREEN-SAVER.

    The display is opened for each look: Xlib ends a program whose open display goes away.

    Returns:
        None where there is no display, or it has no such extension.
    """
    try:
        xlib, extension = ctypes.CDLL("libX11.so.6"), ctypes.CDLL("libXss.so.1")
    except OSError:
        return None
    xlib.XOpenDisplay.restype = ctypes.c_void_p
    xlib.XDefaultRootWindow.restype = ctypes.c_ulong
    display = ctypes.c_void_p(xlib.XOpenDisplay(None))
    if not display:
        return None
    root, info = ctypes.c_ulong(xlib.XDefaultRootWindow(display)), _XScreenSaverInfo()
    has_answered = extension.XScreenSaverQueryInfo(display, root, ctypes.byref(info))
    xlib.XCloseDisplay(display)
    return info.idle / 1000 if has_answered else None


class MacFacts:
    """macOS: the counter of the input system."""

    no_idle_reason = "ioreg shows no HIDIdleTime"

    def read_idle_seconds(self) -> float | None:
        """Return the seconds since the last input; see `SystemFacts`."""
        return parse_input_registry(_read_program(("ioreg", "-c", "IOHIDSystem", "-d", "4")))


def parse_input_registry(text: str) -> float | None:
    """Return the idle seconds that `ioreg` states in nanoseconds; None if it states none."""
    found = re.search(r'"HIDIdleTime" = (\d+)', text)
    return int(found[1]) / 1e9 if found else None


class _LastInput(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint), ("milliseconds", ctypes.c_uint)]


class WindowsFacts:
    """Windows: the time of the session's last input."""

    no_idle_reason = "this Windows session has no keyboard and mouse"

    def read_idle_seconds(self) -> float | None:
        """Return the seconds since the last input; see `SystemFacts`."""
        # The type checker runs on other systems, whose ctypes have no windll.
        libraries: Any = ctypes.windll  # pyright: ignore[reportAttributeAccessIssue]
        last = _LastInput(size=ctypes.sizeof(_LastInput))
        if not libraries.user32.GetLastInputInfo(ctypes.byref(last)):
            return None
        return since_tick(libraries.kernel32.GetTickCount(), last.milliseconds)


def since_tick(now: int, then: int) -> float:
    """Return the seconds between two counts of milliseconds that begin again at 2³²."""
    return ((now - then) % (1 << 32)) / 1000


def open_machine_facts(system: str = sys.platform) -> SystemFacts:
    """Return what reads the facts of this system."""
    if system == "win32":
        return WindowsFacts()
    return MacFacts() if system == "darwin" else LinuxFacts()


def _read_program(command: tuple[str, ...]) -> str:
    """Return what a program prints, or printed in the same `PROGRAM_SECONDS`."""
    return read_program(command, int(time.monotonic() / PROGRAM_SECONDS))


@lru_cache(maxsize=1)
def read_program(command: tuple[str, ...], period: int) -> str:
    """Return what a program prints in a period; "" where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=PROGRAM_LIMIT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


class FactsReader:
    """Read the facts that a machine's rules need."""

    def __init__(self, machine: SystemFacts | None = None, gpu_indices: Sequence[int] = ()) -> None:
        """Read from this machine; `gpu_indices` are those of the GPUs on which it may train."""
        self.machine = machine or open_machine_facts()
        self._processes = list_own_processes()
        self._other_cpu: deque[float] = deque(maxlen=CPU_READINGS)
        self._gpu_indices = gpu_indices
        self._gpus: list[GpuSensor] | None = None

    def read(self, limits: Limits) -> Facts:
        """Read what these limits need."""
        return Facts(
            idle_seconds=self.machine.read_idle_seconds() if limits.idle is not None else None,
            on_battery=not limits.on_battery and is_on_battery(),
            other_cpu=self._measure_others() if limits.busy_cpu is not None else None,
            programs=list_running(limits.pause_for) if limits.pause_for else (),
            celsius=self.read_celsius() if limits.max_temperature is not None else None,
        )

    def _measure_others(self) -> float:
        """Return the percentage of all cores that other programs used, over the last readings."""
        own = sum(map(_read_cpu_percent, self._processes)) / (psutil.cpu_count() or 1)
        self._other_cpu.append(max(0.0, psutil.cpu_percent() - own))
        return sum(self._other_cpu) / len(self._other_cpu)

    def read_celsius(self) -> float | None:
        """Return the highest temperature of CPU and GPUs; None where none is revealed."""
        if self._gpus is None:
            self._gpus = [GpuSensor(index) for index in self._gpu_indices]
        gpus = (gpu.measure().get("gpu_celsius") for gpu in self._gpus)
        known = [value for value in (read_cpu_celsius(), *gpus) if value is not None]
        return max(known, default=None)

    def explain_missing(self, limits: Limits) -> str:
        """Return why a rule cannot be obeyed on this machine, as a sentence; "" if all can."""
        if limits.idle is not None and self.machine.read_idle_seconds() is None:
            return (
                "--idle needs to see when keyboard and mouse were used last, and "
                f"{self.machine.no_idle_reason}: leave it out here"
            )
        if limits.max_temperature is not None and self.read_celsius() is None:
            return "--max-temperature: this machine reveals no temperature; leave it out here"
        return ""


def list_own_processes() -> list[psutil.Process]:
    """Return this process and, if `torchrun` started it, the other ranks on this machine."""
    own = psutil.Process()
    starter = own.parent() if count_ranks() > 1 else None
    return starter.children() if starter is not None else [own]


def _read_cpu_percent(process: psutil.Process) -> float:
    """Return the percentage of a core that a process used since the last call; 0 after its end."""
    try:
        return process.cpu_percent()
    except psutil.Error:
        return 0.0


def list_running(names: Iterable[str]) -> tuple[str, ...]:
    """Return those of these programs that run besides this one, whatever the case of letters."""
    others = (each for each in psutil.process_iter(["name"]) if each.pid != os.getpid())
    running = {_plain_name(each.info["name"] or "") for each in others}
    return tuple(name for name in names if _plain_name(name) in running)


def _plain_name(name: str) -> str:
    return name.lower().removesuffix(".exe")


def is_on_battery() -> bool:
    """Return whether the machine runs on its battery; one without a battery does not."""
    try:
        battery = psutil.sensors_battery()
    except (OSError, RuntimeError, ValueError):  # drivers may answer nonsense
        return False
    return battery is not None and battery.power_plugged is False
