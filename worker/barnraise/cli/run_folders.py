"""The folders of this machine's runs, for commands that show or control their workers."""

import contextlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import ValidationError

from barnraise.errors import StateError
from barnraise.protocol.coordinator_messages import JoinReply, RunView
from barnraise.spec import RunSpec
from barnraise.state_dir import JOIN_REPLY_FILE, StateDir
from barnraise.training.local_control import LocalControl
from barnraise.training.local_status import LocalStatus, read_status

BLOCK_BYTES = 512  # the unit of `st_blocks`, whatever the file system's blocks are


@dataclass(frozen=True)
class RunFolder:
    """A run's folder on this machine."""

    path: Path
    key: str  # this machine's public key

    @cached_property
    def view(self) -> RunView | None:
        """Return the run as the site described it last; None before this machine was let in."""
        try:
            return JoinReply.model_validate_json((self.path / JOIN_REPLY_FILE).read_bytes()).run
        except (OSError, ValidationError):
            return None

    @cached_property
    def status(self) -> LocalStatus | None:
        """Return what the worker wrote last; None if it wrote nothing, or a crash cut it off."""
        return read_status(self.path)

    @property
    def slug(self) -> str:
        """Return the run's name in addresses, as far as it is known, or else its id."""
        return (self.view.slug if self.view else "") or self.path.name

    @property
    def name(self) -> str:
        """Return the run's name, as far as it is known, or else its id."""
        if self.view:
            return self.view.name
        return self.status.name if self.status else self.path.name

    @property
    def control(self) -> LocalControl:
        """Return the control of the run's worker."""
        return LocalControl(self.path)

    @property
    def is_running(self) -> bool:
        """Return whether a worker works on the run now."""
        return self.control.find_worker() is not None and self.is_locked

    @property
    def is_locked(self) -> bool:
        """Return whether a process uses the folder now."""
        lock = FileLock(self.path / "lock", thread_local=False)
        try:
            with lock.acquire(timeout=0):
                return False
        except Timeout:
            return True

    @property
    def is_owned(self) -> bool:
        """Return whether this machine prepared the run's text."""
        if self.view is None:
            return False
        return RunSpec.from_json(self.view.spec, is_stored=True).owner == self.key

    def disk_bytes(self) -> int:
        """Return the bytes that the folder takes on the disk."""
        return count_disk_bytes(self.path)


def count_disk_bytes(folder: Path) -> int:
    """Return the bytes that a folder's files take on the disk. A hole in a file takes none."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # a worker replaces files meanwhile
            stat = path.lstat()
            total += getattr(stat, "st_blocks", -(-stat.st_size // BLOCK_BYTES)) * BLOCK_BYTES
    return total


def list_run_folders(state_dir: StateDir) -> list[RunFolder]:
    """List the folders of the runs that this machine has worked on."""
    return [RunFolder(path, state_dir.identity.key) for path in state_dir.run_folders()]


def select_run_folders(folders: list[RunFolder], name: str) -> list[RunFolder]:
    """Return the folder of one run, by its id or its name in addresses.

    Raises:
        StateError: this machine has never worked on it.
    """
    for folder in folders:
        if name in (folder.path.name, folder.slug):
            return [folder]
    raise StateError(
        f"this machine has never worked on '{name}': `barnraise status` lists its runs"
    )


def refuse_unknown_run(state_dir: StateDir, name: str) -> None:
    """Refuse a run that this machine has never worked on, before anything slow is imported.

    A folder without a readable answer of the site may belong to any run: the command itself says
    what is wrong with it.

    Raises:
        StateError: this machine has never worked on it.
    """
    folders = list_run_folders(state_dir)
    if all(folder.view is not None for folder in folders):
        select_run_folders(folders, name)
