"""Read what the control groups of Linux allow this process: memory and CPU time.

Versions 1 and 2 are understood. A limit of any group around this one counts. Inside a container
the paths may be the host's and not exist: the root's own files count then. Outside Linux there are
none.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")  # lists this process's groups, one a line
MOUNT = Path("/sys/fs/cgroup")
# Version 1 writes the largest multiple of a page for "no limit"; no machine has an exabyte.
NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class MemoryFiles:
    """The names of a group's files, which differ between the versions."""

    limits: tuple[str, ...]
    usage: str
    inactive_pages: str  # pages of files that were read long ago, in `memory.stat`
    active_pages: str
    events: str  # holds a line with the number of processes that were killed


VERSION_1 = MemoryFiles(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    "total_inactive_file",
    "total_active_file",
    "memory.oom_control",
)
# Above `memory.high` the kernel slows processes down until they use less.
VERSION_2 = MemoryFiles(
    ("memory.max", "memory.high"),
    "memory.current",
    "inactive_file",
    "active_file",
    "memory.events",
)


class ControlGroup:
    """The control groups of one process, which the file `membership` lists."""

    def __init__(self, membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> None:
        self._mount = mount
        self._paths: dict[str, str] = {}  # controller → path; "" for version 2
        for line in read_text(membership).splitlines():
            _, controllers, path = line.split(":", 2)
            self._paths |= dict.fromkeys(controllers.split(","), path)

    # ---- memory

    def memory_limits(self) -> list[int]:
        """Return the memory limits, in bytes, of this group and of those around it."""
        return [limit for _, _, limit in self._limited_groups()]

    def memory_available(self) -> list[int]:
        """Return how many bytes more may be used in each group that has a limit.

        Pages of files that were read or written count as available like those that the kernel
        counts as `MemAvailable`: all that were not used lately, and half of the others.
        """
        available: list[int] = []
        for folder, files, limit in self._limited_groups():
            used = _read_number(folder / files.usage)
            counts = read_counts(folder / "memory.stat")
            pages = counts.get(files.inactive_pages, 0) + counts.get(files.active_pages, 0) // 2
            available.append(max(0, limit - max(0, used - pages)))
        return available

    def oom_kills(self) -> int:
        """Return how many processes of this group the kernel has killed because memory ran out."""
        kills = [
            read_counts(folder / files.events).get("oom_kill", 0)
            for folder, files in self._memory_groups()
        ]
        return max(kills, default=0)

    def pressure_file(self) -> Path | None:
        """Return the file with the pressure on this group's memory (PSI); None if there is none."""
        for folder, files in self._memory_groups():
            if files is VERSION_2 and (folder / "memory.pressure").exists():
                return folder / "memory.pressure"
        return None

    def _memory_groups(self) -> Iterator[tuple[Path, MemoryFiles]]:
        """Yield the group's folder and those around it, the innermost first."""
        for controller, files in (("memory", VERSION_1), ("", VERSION_2)):
            for folder in self._list_folders(controller):
                yield folder, files

    def _limited_groups(self) -> Iterator[tuple[Path, MemoryFiles, int]]:
        for folder, files in self._memory_groups():
            limits = [_read_number(folder / name, NO_LIMIT) for name in files.limits]
            if min(limits) < NO_LIMIT:
                yield folder, files, min(limits)

    # ---- CPU time

    def cpu_quota(self) -> float | None:
        """Return how many CPUs' time the process may use; None for no limit."""
        quotas: list[float] = []
        for folder in self._list_folders(""):
            words = read_text(folder / "cpu.max").split()
            if len(words) == 2 and words[0].isdigit():
                quotas.append(int(words[0]) / int(words[1]))
        for folder in self._list_folders("cpu"):
            quota = _read_number(folder / "cpu.cfs_quota_us")
            period = _read_number(folder / "cpu.cfs_period_us")
            if quota > 0 and period > 0:
                quotas.append(quota / period)
        return min(quotas, default=None)

    def _list_folders(self, controller: str) -> list[Path]:
        """Return the folders of a controller's group and of those around it; "" for version 2."""
        path = self._paths.get(controller)
        if path is None:
            return []
        base = self._mount / controller
        # Where both versions are mounted, version 2 is below version 1.
        if not controller and (self._mount / "unified").is_dir():
            base = self._mount / "unified"
        group = base / path.lstrip("/")
        return [each for each in (group, *group.parents) if each.is_relative_to(base)]


def read_text(path: Path) -> str:
    """Return a file's text; "" if it is missing or may not be read."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def _read_number(path: Path, default: int = 0) -> int:
    """Return the number in a file; the default if it holds none, such as "max"."""
    text = read_text(path).strip()
    return int(text) if text.isdigit() else default


def read_counts(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    pairs = (line.split() for line in read_text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
