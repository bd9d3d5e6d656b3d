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
    """A folder that exports may fill."""

    folder: Path  # the folder, absolute and without symbolic links
    record: Path  # the file that records what the last exports wrote into it

    @classmethod
    def choose(cls, folder: Path, records: Path) -> "ExportTarget":
        """Check that a folder can become an export.

        Args:
            folder: does not exist yet, is empty, or holds an earlier export without changes.
            records: the folder of the records in this machine's state directory.

        Raises:
            StateError: The folder holds anything else. Nothing has changed.
        """
        try:
            resolved = folder.resolve()
        except (OSError, RuntimeError) as error:  # links that lead to each other
            raise StateError(f"{folder} cannot be used: {error}") from None
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
        foreign = self._foreign_files(folder)
        if foreign:
            shown = ", ".join(foreign[:SHOWN_FILES])
            more = len(foreign) - SHOWN_FILES
            rest = f" and {more} more" if more > 0 else ""
            raise StateError(
                f"{folder} holds files that no export of this machine wrote, or that were changed "
                f"since: {shown}{rest}. Nothing was touched; name a new folder"
            )

    def _foreign_files(self, folder: Path) -> list[str]:
        """List what is in a folder and is not as an export into the target left it."""
        known = self._read_record()
        return [
            path.name
            for path in sorted(folder.iterdir())
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

    def _write_record(self, files: Mapping[str, list[str]]) -> None:
        record = {"folder": str(self.folder), "files": files}
        write_atomically(self.record, json.dumps(record, indent=1).encode())

    def _add_to_record(self, inventory: Inventory) -> None:
        """Record files that an export is about to write, next to those of earlier ones."""
        files = self._read_record()
        for name, digest in inventory.items():
            files.setdefault(name, []).append(digest)
        self._write_record(files)

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
        with _unwritable_named(parent):
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
            with _unwritable_named(parent):
                new.mkdir()
            try:
                yield new
                self._publish(new)
            finally:
                self._finish_swap()
                if new.exists():
                    shutil.rmtree(new)
                self._new_folder_record.unlink(missing_ok=True)

    @property
    def _new_folder_record(self) -> Path:
        """Return the file that names the new folder while an export fills it."""
        return self.record.with_suffix(".new-folder")

    @property
    def _old_folder_record(self) -> Path:
        """Return the file that names the earlier export while it makes way for the new one."""
        return self.record.with_suffix(".old-folder")

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
        """Remove the folders of an export that was killed. The records name what is ours."""
        self._finish_swap()
        leftover = self._read_folder(self._new_folder_record, "new")
        if leftover is not None:
            shutil.rmtree(leftover, ignore_errors=True)
        self._new_folder_record.unlink(missing_ok=True)

    def _read_folder(self, record: Path, kind: str) -> Path | None:
        """Return the folder next to the target that a record names, if it is there and ours."""
        try:
            folder = Path(record.read_bytes().decode(errors="surrogateescape"))
        except FileNotFoundError:
            return None
        is_ours = folder.name.startswith(f".{self.folder.name}.{kind}-")
        if not is_ours or folder.parent != self.folder.parent or folder.is_symlink():
            return None
        return folder if folder.is_dir() else None

    def _finish_swap(self) -> Path | None:
        """Finish or undo an exchange of folders that was interrupted.

        Where the new folder has not taken the target's place, the earlier export returns to it.
        Where it has, the files of the earlier export are removed.

        Returns:
            The earlier export's folder, if it stays because it holds anything else.
        """
        old = self._read_folder(self._old_folder_record, "old")
        if old is not None and not self.folder.exists():
            old.rename(self.folder)
            sync_folder(self.folder.parent)
        elif old is not None:
            foreign = set(self._foreign_files(old))
            for path in sorted(old.iterdir()):
                if path.name not in foreign:
                    path.unlink()
            with contextlib.suppress(OSError):  # it holds what no export wrote
                old.rmdir()
        self._old_folder_record.unlink(missing_ok=True)
        return old if old is not None and old.exists() else None

    def _publish(self, new: Path) -> None:
        """Let the new folder take the target's place; the earlier export leaves last."""
        inventory = {path.name: _digest(path) for path in sorted(new.iterdir())}
        for name in inventory:
            sync_file(new / name)
        sync_folder(new)
        self.check()
        self._add_to_record(inventory)
        if not self.folder.exists():
            new.rename(self.folder)
            sync_folder(self.folder.parent)
        else:
            self._swap(new)
        self._write_record({name: [digest] for name, digest in inventory.items()})

    def _swap(self, new: Path) -> None:
        """Exchange the target for the new folder, and remove the earlier export."""
        old = self.folder.with_name(f".{self.folder.name}.old-{secrets.token_hex(4)}")
        write_atomically(self._old_folder_record, str(old).encode(errors="surrogateescape"))
        self.folder.rename(old)
        new.rename(self.folder)  # after a failure, or a kill, `_finish_swap` puts the old one back
        sync_folder(self.folder.parent)
        if remaining := self._finish_swap():
            raise StateError(
                f"the export is complete, and {remaining} holds files that were added to the "
                "earlier export meanwhile"
            )


@contextlib.contextmanager
def _unwritable_named(folder: Path) -> Iterator[None]:
    """Turn a refusal of the file system into a sentence."""
    try:
        yield
    except OSError as error:
        raise StateError(
            f"nothing can be written to {folder} ({error.strerror or error}): "
            "name a folder elsewhere"
        ) from None


def _digest(path: Path) -> str:
    if path.stat().st_size == 0:  # an empty file cannot be mapped into memory
        return blake3(b"").hexdigest()
    return blake3().update_mmap(path).hexdigest()
