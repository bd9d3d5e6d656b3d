"""Write files and SQLite rows so that a crash leaves the old or the new content, never a torn one.

For files the order is always the same: the bytes reach the disk first, then the file gets its name,
then the folder's entry reaches the disk. Standard library only.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

AnyPath = str | os.PathLike[str]


def write_atomically(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace a file durably: after a crash it holds the old or the new bytes, all of them.

    Its folder is created if missing. Of a private file, only the owner may read (mode 0600).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    if private:
        temporary.unlink(missing_ok=True)
        exclusive = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        file = os.fdopen(os.open(temporary, exclusive, 0o600), "wb")
    else:
        file = temporary.open("wb")
    with file:
        _write_durably(file, data)
    _rename_durably(temporary, path)


def _write_durably(file: BinaryIO, data: bytes | memoryview) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _rename_durably(temporary: AnyPath, path: AnyPath) -> None:
    os.replace(temporary, path)
    sync_folder(os.path.dirname(path) or ".")


def write_into_place(temporary: AnyPath, path: AnyPath, data: bytes | memoryview) -> None:
    """Write a file durably under a temporary name, and give it its final one.

    After a crash it is whole or absent under its final name. Both are in one folder, which exists.
    """
    with open(temporary, "wb") as file:
        _write_durably(file, data)
    _rename_durably(temporary, path)


def move_into_place(temporary: AnyPath, path: AnyPath) -> None:
    """Give a finished file its final name durably: after a crash it is whole or absent."""
    sync_file(temporary)
    _rename_durably(temporary, path)


def sync_file(path: AnyPath) -> None:
    """Wait until a file's bytes are on the disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def sync_folder(path: AnyPath) -> None:
    """Wait until a folder's entries are on the disk.

    Only POSIX systems can open a folder; Windows makes a rename durable together with the file.
    """
    if os.name != "posix":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit the statements in the block together, or none of them, for instance on a full disk.

    The connection is in autocommit mode. The caller ensures that no other thread uses it meanwhile.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
