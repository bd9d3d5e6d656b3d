"""Read systemd's units and environment files as systemd does, and start what they name.

Starting and stopping units needs systemd as the first process, which no test has: the commands of a
unit run as children of the test, with the environment that systemd would give them.
"""

import configparser
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from coordinator.demo.processes import ChildCommand, ProcessGroup

Unit = configparser.ConfigParser
# What docs/deploy may use. systemd ignores a key that it does not know.
KEYS = {
    "Unit": {"Description", "After", "Before", "Wants", "StartLimitIntervalSec"},
    "Service": {"Type", "User", "WorkingDirectory", "EnvironmentFile", "ExecStart", "Nice"}
    | {"Restart", "RestartSec", "LimitNOFILE", "NoNewPrivileges", "PrivateTmp", "ProtectSystem"},
    "Timer": {"OnCalendar", "RandomizedDelaySec", "Persistent", "OnBootSec", "OnUnitActiveSec"},
    "Install": {"WantedBy"},
}
ASSIGNMENT = re.compile(r"(\w+)=(\"[^\"]*\"|'[^']*'|[^\"']*)")


def read_unit(text: str) -> Unit:
    """Parse a unit; each of its keys may occur once."""
    unit = Unit(interpolation=None)
    unit.optionxform = str
    unit.read_string(text.replace("\\\n", " "))
    return unit


def read_environment(text: str) -> dict[str, str]:
    """Parse an environment file: systemd removes quotes around a value and expands nothing."""
    values = {}
    for line in text.splitlines():
        if line and line[0] not in "#;":
            assignment = ASSIGNMENT.fullmatch(line.strip())
            assert assignment, f"systemd ignores {line!r}"
            values[assignment[1]] = assignment[2].strip("\"'")
    return values


def read_command(unit: Unit) -> list[str]:
    """Return the words of a service's command line."""
    words = shlex.split(unit["Service"]["ExecStart"])
    return [word.replace("$$", "$").replace("%%", "%") for word in words]


class UnitProcesses:
    """Start and stop the services of a folder of units; timers are only read.

    Args:
        folder: The units.
        logs: The folder for what they print.
        place: Translates the paths and ports of a unit to those of the test.
    """

    def __init__(self, folder: Path, logs: Path, place: Callable[[str], str]):
        self._folder = folder
        self._place = place
        self._processes = ProcessGroup(logs)

    def control(self, verb: str, *names: str) -> None:
        """Do what `systemctl` does with these arguments."""
        units = [name for name in names if not name.startswith("-")]
        match verb:
            case "daemon-reload":
                assert not names and list(self._folder.iterdir())
            case "start" | "enable":
                assert verb == "start" or "--now" in names
                for name in units:
                    self._start(name)
            case "stop":
                for name in units:
                    assert (self._folder / f"{name}.service").exists()
                self._processes.stop(*units)
            case _:
                raise AssertionError(f"systemctl {verb} is not known here")

    def stop(self) -> None:
        """Stop all services."""
        self._processes.stop()

    def log_tails(self) -> str:
        """Return the last lines of all services that run."""
        names = list(self._processes.children)
        return "\n".join(f"{name}: {self._processes.log_tail(name)}" for name in names)

    def _start(self, name: str) -> None:
        if name.endswith(".timer"):
            assert "Timer" in self._read(name)
            assert self._read(name.replace(".timer", ".service"))["Service"]["Type"] == "oneshot"
            return
        unit = self._read(f"{name}.service")
        service = unit["Service"]
        file = Path(service["EnvironmentFile"])
        # What systemd passes on of its own; nothing of the test's may reach a service.
        inherited = dict.fromkeys(set(os.environ) - {"PATH", "HOME", "LANG"}, "")
        environment = {**inherited, **read_environment(file.read_text())}
        folder = Path(service["WorkingDirectory"])
        child = ChildCommand(tuple(read_command(unit)), environment, folder=folder)
        self._processes.start_child(name, child)

    def _read(self, name: str) -> Unit:
        return read_unit(self._place((self._folder / name).read_text()))
