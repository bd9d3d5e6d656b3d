"""Watch the processes of a drill, wait for what they do, and end all of them in every case.

    with ExitStack() as cleanup:
        children = ChildProcesses(folder, cleanup)
        children.watch(lambda: [ChildStatus("site", site.poll(), log)])
        children.wait_until(site_answers, "the site's answer", 60)

However the block ends (normally, by an exception, by Ctrl-C or by SIGTERM), no process remains.
If it fails, the watched processes that have died are printed with the ends of their logs.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from available_clock import AvailableClock
from own_processes import OwnProcesses

LOG_LINES = 15  # of a process that has died
LOG_BYTES = 1 << 16  # from its end, in which they are searched
POLL_SECONDS = 0.1
END_SIGNALS = [
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
]


@dataclass(frozen=True)
class ChildStatus:
    """A watched process, which should run now.

    Attributes:
        name: Its name.
        exit_code: None while it runs.
        log: The file with its messages.
        may_finish: Whether it may have ended without an error.
        cause: Why it has ended, if more than an exit code is known.
    """

    name: str
    exit_code: int | None
    log: Path
    may_finish: bool = False
    cause: str = ""

    @property
    def has_died(self) -> bool:
        """Return whether it should still run and does not."""
        return self.exit_code is not None and not (self.may_finish and self.exit_code == 0)

    def describe(self) -> str:
        """Return how it ended, with the end of its log."""
        cause = self.cause or f"exit code {self.exit_code}"
        if self.exit_code is not None and self.exit_code < 0:
            cause = f"signal {signal.Signals(-self.exit_code).name}"
        return f"{self.name} has died ({cause}). The end of {self.log}:\n{read_tail(self.log)}"


Source = Callable[[], Iterable[ChildStatus]]


class ChildDiedError(Exception):
    """A watched process has died that should run."""


class OverdueError(TimeoutError):
    """What a drill waited for did not happen in time."""


@dataclass(frozen=True)
class Progress:
    """Work that goes on during a wait, which must not be given up before so much of it is done.

    Attributes:
        amount: Returns what has been done since the drill's beginning.
        enough: By how much it grows before the event is overdue.
    """

    amount: Callable[[], float]
    enough: float


class ChildProcesses:
    """The processes of one drill.

    From its creation on, signals that end a program raise SystemExit in the main thread, once, so
    that nothing interrupts what cleans up.

    Attributes:
        clock: Counts the seconds that other programs leave; all limits are on it.
    """

    def __init__(self, folder: Path, cleanup: ExitStack) -> None:
        """Watch nothing yet.

        Args:
            folder: In which the drill works.
            cleanup: Its end is that of all processes; what was entered before ends after them.
        """
        self._own = OwnProcesses(folder)
        self._sources: list[Source] = []
        self.clock = AvailableClock(self._own.cpu_seconds)
        for number in END_SIGNALS:
            cleanup.callback(signal.signal, number, signal.getsignal(number))
        self.catch_signals()
        cleanup.push(self._end)

    def catch_signals(self) -> None:
        """Let the next signal that ends a program raise SystemExit in the main thread.

        Call it again after an event loop that has handled signals itself.
        """
        for number in END_SIGNALS:
            signal.signal(number, _exit_once)

    def watch(self, source: Source) -> None:
        """Watch the processes that `source` returns whenever it is called."""
        self._sources.append(source)

    def find_dead(self) -> list[ChildStatus]:
        """Return the watched processes that have died."""
        return [child for source in self._sources for child in source() if child.has_died]

    def check(self) -> None:
        """Raise ChildDiedError if a watched process has died."""
        if dead := self.find_dead():
            raise ChildDiedError("\n".join(child.describe() for child in dead))

    def wait_until(
        self,
        happened: Callable[[], object],
        event: str,
        seconds: float,
        progress: Progress | None = None,
    ) -> float:
        """Wait until `happened` returns true.

        Args:
            happened: Called ten times a second.
            event: Names it in the message if it does not happen.
            seconds: That the event may take on a machine without other work; see `AvailableClock`.
            progress: What must have been done too before the event is overdue. If nothing of it is
                done within `seconds`, the event is overdue.

        Returns:
            The seconds that it took, on the same clock.

        Raises:
            ChildDiedError: If a watched process dies meanwhile.
            OverdueError: If it does not happen in time.
        """
        start = self.clock.now()
        started = time.monotonic()
        first = progress.amount() if progress else 0.0
        amount, advanced_at = first, start
        while not happened():
            self.check()
            now = self.clock.now()
            is_overdue = now - start > seconds
            if progress is not None and is_overdue:
                latest = progress.amount()
                if latest != amount:
                    amount, advanced_at = latest, now
                is_stalled = now - advanced_at > seconds
                is_overdue = is_stalled or amount - first >= progress.enough
            if is_overdue:
                wall = time.monotonic() - started
                raise OverdueError(
                    f"{event}: not within {now - start:.0f} seconds of this machine "
                    f"({wall:.0f} seconds, of which other programs used the rest)"
                )
            time.sleep(POLL_SECONDS)
        return self.clock.now() - start

    def sleep(self, seconds: float) -> None:
        """Wait, and raise ChildDiedError if a watched process dies meanwhile."""
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(remaining, 1.0))

    def _end(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Print what died if the drill failed, and kill what still runs."""
        for number in END_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if error is not None and not isinstance(error, ChildDiedError):
            for child in self.find_dead():
                print(child.describe(), file=sys.stderr, flush=True)
        for process in self._own.end_all():
            print(f"{process} could not be ended", file=sys.stderr, flush=True)


def _exit_once(number: int, frame: FrameType | None) -> None:
    for each in END_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    # A print may have been interrupted, which must not be entered again.
    os.write(2, f"stopped by {signal.Signals(number).name}\n".encode())
    raise SystemExit(128 + number)


def list_statuses(
    children: Mapping[str, subprocess.Popen], logs: Path, may_finish: Collection[str] = ()
) -> list[ChildStatus]:
    """Return the statuses of named processes that should run.

    Args:
        children: The processes.
        logs: Folder with a log of each.
        may_finish: Names of those that end by themselves.
    """
    return [
        ChildStatus(name, child.poll(), logs / f"{name}.log", name in may_finish)
        for name, child in list(children.items())
    ]


def read_tail(log: Path, lines: int = LOG_LINES) -> str:
    """Return the last lines of a log; "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
