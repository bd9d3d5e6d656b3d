"""Find out whether the last worker in a run's folder was killed because memory ran out.

While a worker runs, a file in the folder describes it; a worker that ends, by an error too, removes
it. The file that a killed worker leaves, and the kernel's counts of such kills, say what happened.
"""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from barnraise.durable_io import write_atomically
from barnraise.errors import PlanError
from barnraise.formats import format_bytes
from barnraise.planning.control_group import ControlGroup, read_counts, read_text
from barnraise.planning.limits import Limits
from barnraise.planning.memory_pressure import SMALLER

log = logging.getLogger("barnraise")

FILE_NAME = "running.json"
BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")
SYSTEM_COUNTS = Path("/proc/vmstat")

T = TypeVar("T")


@dataclass(frozen=True)
class KillCounts:
    """How often the kernel has killed programs for memory since it started."""

    boot: str = ""  # names the start of the system; "" where it has no name
    group: int = 0  # kills in this process's control group
    system: int = 0  # kills on the whole machine

    def has_kills_since(self, before: "KillCounts") -> bool:
        """Return whether there were kills since an earlier count, as far as it can be compared."""
        is_comparable = bool(self.boot) and self.boot == before.boot
        return is_comparable and (self.group > before.group or self.system > before.system)


def count_kills() -> KillCounts:
    """Read the kernel's counts; zeros where the system has none."""
    return KillCounts(
        boot=read_text(BOOT_FILE).strip(),
        group=ControlGroup().oom_kills(),
        system=read_counts(SYSTEM_COUNTS).get("oom_kill", 0),
    )


@dataclass(frozen=True)
class RunningWorker:
    """A worker as its file describes it."""

    process: int
    host_bytes: int  # bytes of RAM that its plan uses
    is_short: bool  # whether memory was short when it was last measured
    kills: KillCounts  # the counts when it started


class RunningMark:
    """The file that describes the worker in a run's folder.

    Args:
        folder: the run's folder, which the caller has locked.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._worker: RunningWorker | None = None

    def write(self, host_bytes: int) -> None:
        """Describe this process as the folder's worker, with the RAM that its plan uses."""
        self._store(RunningWorker(os.getpid(), host_bytes, False, count_kills()))

    def set_shortage(self, is_short: bool) -> None:
        """Record whether memory is short now; writes only when that has changed."""
        if self._worker is not None and self._worker.is_short != is_short:
            self._store(replace(self._worker, is_short=is_short))

    def remove(self) -> None:
        """Remove the file: the worker ends in order."""
        self._worker = None
        self._path.unlink(missing_ok=True)

    def load(self) -> RunningWorker | None:
        """Return the worker that the file describes; None if it ended in order.

        A file that cannot be read says nothing about memory, and counts as none.
        """
        try:
            fields = json.loads(self._path.read_bytes())
            return RunningWorker(**fields | {"kills": KillCounts(**fields["kills"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError) as error:
            log.debug("%s cannot be read: %s", self._path, error)
            return None

    def _store(self, worker: RunningWorker) -> None:
        self._worker = worker
        write_atomically(self._path, json.dumps(asdict(worker)).encode())


def find_memory_kill(last: RunningWorker | None, now: KillCounts) -> str:
    """Return a sentence about how memory ended the last worker; "" if it did not. Pure."""
    if last is None:
        return ""
    size = format_bytes(last.host_bytes)
    if now.has_kills_since(last.kills):
        return (
            f"the system killed the last worker here because memory ran out (its plan used {size})"
        )
    if last.is_short:
        return f"the last worker here was killed while memory was short (its plan used {size})"
    return ""


def create_within_memory(folder: Path, limits: Limits, create: Callable[[Limits], T]) -> T:
    """Create a worker; under smaller limits if the last one in its folder was killed for memory.

    Raises:
        PlanError: the model does not fit, whatever happened before.
    """
    last = RunningMark(folder).load()
    sentence = find_memory_kill(last, count_kills())
    if last is None or not sentence:
        return create(limits)
    memory = int(SMALLER * last.host_bytes)
    if limits.memory is not None:
        memory = min(memory, limits.memory)
    try:
        worker = create(replace(limits, memory=memory))
    except PlanError:
        log.warning("%s, and there is no smaller plan: close other programs", sentence)
        return create(limits)
    log.warning(
        "%s. This one plans with at most %s. To plan so always: barnraise limits --memory %dMB",
        sentence,
        format_bytes(memory),
        memory // 10**6,
    )
    return worker
