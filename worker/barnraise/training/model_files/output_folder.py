"""Write a folder of files without ever deleting or overwriting a file that no export wrote.

The files are written into a new folder next to the target, which takes the target's place only when
they are all complete and durable. What earlier exports wrote is recorded in the machine's state
directory, not in the folder: a folder that came from elsewhere is never mistaken for an export.
"""

import contextlib
import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from filelock import FileLock, Timeout

from barnraise.durable_io import sync_file, sync_folder, write_atomically
from barnraise.errors import StateError
from barnraise.formats import format_bytes

SHOWN_FILES = 3  # of the files that prevent an export, in its refusal
SPARE_BYTES = 64 << 20  # of disk space that stay free

Inventory = Mapping[str, str]  # a file's name → the BLAKE3 of its content


@dataclass(frozen=True)
class ExportTarget:
    """A folder that exports may fill.

    Attributes:
        folder: the folder, absolute and without symbolic links.
        record: the file that records what the last exports wrote into it.
    """

    folder: Path
    record: Path

    @classmethod
    def choose(cls, folder: Path, records: Path) -> "ExportTarget":
        """Check that a folder can become an export.

        Args:
            folder: does not exist yet, is empty, or holds an earlier export without changes.
            records: the folder of the records in this machine's state directory.

        Raises:
            StateError: The folder holds anything else. Nothing has changed.
        """
        resolved = folder.resolve()
        name = blake3(str(resolved).encode(errors="surrogateescape")).hexdigest()[:32]
        target = cls(resolved, records / f"{name}.json")
        target.check()
        return target

    def check(self) -> None:
        """Check that the folder holds nothing but unchanged files of earlier exports.

        Raises:
            StateError: It holds anything else.
        """
        folder = self.folder
        if not folder.exists():
            return
        if not folder.is_dir():
            raise StateError(f"{folder} is a file: name a new folder")
        if folder.is_mount():
            raise StateError(f"{folder} is a mount point: name a folder inside it")
        if Path.cwd().resolve().is_relative_to(folder):
            raise StateError(f"{folder} holds the current folder: name a folder inside it")
        foreign = self._foreign_files()
        if foreign:
            shown = ", ".join(foreign[:SHOWN_FILES])
            more = len(foreign) - SHOWN_FILES
            rest = f" and {more} more" if more > 0 else ""
            raise StateError(
                f"{folder} holds files that no export of this machine wrote, or that were changed "
                f"since: {shown}{rest}. Nothing was touched; name a new folder"
            )

    def _foreign_files(self) -> list[str]:
        """List what is in the folder and is not as an export of this machine left it."""
        known = self._read_record()
        return [
            path.name
            for path in sorted(self.folder.iterdir())
            if path.is_symlink()
            or not path.is_file()
            or path.name not in known
            or _digest(path) not in known[path.name]
        ]

    def _read_record(self) -> dict[str, list[str]]:
        """Return name → digests of the files that exports have written; {} without a record."""
        try:
            record = json.loads(self.record.read_bytes())
            files = record["files"] if record["folder"] == str(self.folder) else {}
            return {str(name): [str(digest) for digest in files[name]] for name in files}
        except (OSError, ValueError, TypeError, KeyError):
            return {}

    def _write_record(self, *inventories: Inventory) -> None:
        files: dict[str, list[str]] = {}
        for inventory in inventories:
            for name, digest in inventory.items():
                files.setdefault(name, []).append(digest)
        record = {"folder": str(self.folder), "files": files}
        write_atomically(self.record, json.dumps(record, indent=1).encode())

    @contextlib.contextmanager
    def replace(self, size: int) -> Iterator[Path]:
        """Yield a new folder next to the target, which takes its place after the block.

        After a failure in the block the new folder is removed and the target is as it was.

        Args:
            size: bytes that will be written, about.

        Raises:
            StateError: The disk is too small, or the target was changed meanwhile.
        """
        parent = self.folder.parent
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if size + SPARE_BYTES > free:
            raise StateError(
                f"the export takes {format_bytes(size)}, and {parent} has {format_bytes(free)} left"
            )
        with self._lock():
            self._remove_leftovers()
            new = parent / f".{self.folder.name}.new-{secrets.token_hex(4)}"
            write_atomically(self._new_folder_record, str(new).encode(errors="surrogateescape"))
            new.mkdir()
            try:
                yield new
                self._publish(new)
            finally:
                if new.exists():
                    shutil.rmtree(new)
                self._new_folder_record.unlink(missing_ok=True)

    @property
    def _new_folder_record(self) -> Path:
        """Return the file that names the new folder while an export fills it."""
        return self.record.with_suffix(".new-folder")

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Let no other export of this machine fill the folder during the block.

        Raises:
            StateError: Another one does.
        """
        self.record.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.record.with_suffix(".lock"), thread_local=False)
        try:
            with lock.acquire(timeout=0):
                yield
        except Timeout:
            raise StateError(f"another export fills {self.folder} now") from None

    def _remove_leftovers(self) -> None:
        """Remove the new folder of an export that was killed. The record names what is ours."""
        try:
            text = self._new_folder_record.read_bytes().decode(errors="surrogateescape")
        except FileNotFoundError:
            return
        leftover = Path(text)
        is_ours = leftover.name.startswith(f".{self.folder.name}.new-")
        if is_ours and leftover.parent == self.folder.parent and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        self._new_folder_record.unlink(missing_ok=True)

    def _publish(self, new: Path) -> None:
        """Let the new folder take the target's place; the earlier export leaves last."""
        inventory = {path.name: _digest(path) for path in sorted(new.iterdir())}
        for name in inventory:
            sync_file(new / name)
        sync_folder(new)
        self.check()
        before: dict[str, str] = {}
        if self.folder.exists():
            before = {path.name: _digest(path) for path in sorted(self.folder.iterdir())}
        self._write_record(inventory, before)
        if not self.folder.exists():
            new.rename(self.folder)
            sync_folder(self.folder.parent)
        else:
            self._swap(new, before)
        self._write_record(inventory)

    def _swap(self, new: Path, before: Inventory) -> None:
        """Exchange the target for the new folder, and remove the files of `before`."""
        old = self.folder.with_name(f".{self.folder.name}.old-{secrets.token_hex(4)}")
        self.folder.rename(old)
        try:
            new.rename(self.folder)
        except OSError:
            old.rename(self.folder)
            raise
        sync_folder(self.folder.parent)
        for name in before:
            (old / name).unlink()
        try:
            old.rmdir()
        except OSError:
            raise StateError(
                f"the export is complete, and {old} holds files that were added to the earlier "
                "export meanwhile"
            ) from None


def _digest(path: Path) -> str:
    if path.stat().st_size == 0:  # an empty file cannot be mapped into memory
        return blake3(b"").hexdigest()
    return blake3().update_mmap(path).hexdigest()
