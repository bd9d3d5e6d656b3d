"""The worker's log file in the state directory, and `barnraise logs`, which shows it."""

import logging
import time
from collections import deque
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Annotated

import typer
from filelock import FileLock, Timeout

from barnraise.cli.console import SafeFormatter, configure_logging, errors, out
from barnraise.cli.machine_options import HomeOption, open_state_dir
from barnraise.errors import StateError
from barnraise.state_dir import StateDir

LOG_FOLDER = "logs"  # in the state directory
MAX_LOG_BYTES = 2_000_000  # of a file, before the next one begins
OLD_LOGS = 3  # files before the current one
MAX_WRITERS = 100  # workers of one state directory, each with a log file of its own
FOLLOW_SECONDS = 0.3  # between two looks for new lines


class WorkerLogHandler(RotatingFileHandler):
    """A log file of one process. Several workers of one state directory write to several files.

    A log that cannot be written, on a full disk, is said once and does not stop training.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path, self._file_lock = _lock_log(folder)
        super().__init__(
            path, maxBytes=MAX_LOG_BYTES, backupCount=OLD_LOGS, encoding="utf-8", delay=True
        )
        self.setFormatter(SafeFormatter())
        self._has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Print once that the log cannot be written."""
        if not self._has_failed:
            self._has_failed = True
            errors.print_sentence(f"The log file {self.baseFilename} cannot be written now.")

    def close(self) -> None:
        """Close the file and let another worker use it."""
        super().close()
        self._file_lock.release()


def configure_worker_logging(state_dir: StateDir) -> None:
    """Log to stderr, and to a log file of this process in the state directory."""
    configure_logging(WorkerLogHandler(state_dir.path / LOG_FOLDER))


def _lock_log(folder: Path) -> tuple[Path, FileLock]:
    """Return the first log file that no other worker writes to, with its lock."""
    for number in range(1, MAX_WRITERS):
        name = "worker" if number == 1 else f"worker-{number}"
        lock = FileLock(folder / f"{name}.lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        return folder / f"{name}.log", lock
    raise StateError(f"{MAX_WRITERS} workers write logs in {folder}")


def logs(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines to show first.")] = 50,
    home: HomeOption = None,
) -> None:
    """Show what the worker on this machine has logged last.

    Example: barnraise logs -f
    """
    folder = open_state_dir(home).path / LOG_FOLDER
    path = find_newest_log(folder)
    if path is None:
        raise StateError("this machine has no log yet: `barnraise join RUN` writes it")
    for line in read_last_lines(path, lines):
        out.print(line, markup=False, soft_wrap=True)
    if not follow:
        return
    try:
        for line in follow_log(path):
            out.print(line, markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        return


def find_newest_log(folder: Path) -> Path | None:
    """Return the log file that was written last; None if there is none."""
    paths = sorted(folder.glob("worker*.log"), key=lambda path: path.stat().st_mtime)
    return paths[-1] if paths else None


def read_last_lines(path: Path, count: int) -> list[str]:
    """Return a log's last lines, from the file before it as well."""
    last: deque[str] = deque(maxlen=count)
    for part in (path.with_name(f"{path.name}.1"), path):
        if part.exists():
            with part.open(encoding="utf-8", errors="replace") as file:
                last.extend(line.rstrip("\n") for line in file)
    return list(last)


def follow_log(path: Path) -> Iterator[str]:
    """Yield the lines that are added to a log from now on, also when the next file begins."""
    position = path.stat().st_size
    partial = b""
    while True:
        # The file is open for moments only: Windows could not rename it otherwise.
        size = path.stat().st_size if path.exists() else 0
        if size < position:
            position = 0
        if size > position:
            with path.open("rb") as file:
                file.seek(position)
                data = file.read(size - position)
            position = size
            *whole, partial = (partial + data).split(b"\n")
            yield from (line.decode(errors="replace").rstrip("\r") for line in whole)
        else:
            time.sleep(FOLLOW_SECONDS)
