"""Files named by what is in them: update payloads, text shards, fragments of a frozen anchor.

A blob appears under its name only once it is whole, checked and fsynced, so that whoever sees one may rely on it after
a crash. One that arrives in pieces grows beside its name as `<digest>.part` and goes on from there after an
interruption. Writers of the same blob may race: they write the same bytes.
"""

import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from blake3 import blake3

from barnraise.durable_io import move_into_place, sync_folder

EMPTY_DIGEST = blake3(b"").hexdigest()  # the blob without bytes: always here, and no file
MAX_PARTIAL_AGE = (
    7 * 86400.0
)  # seconds without a byte after which a blob that never got whole is swept at the next start
_READ = 1 << 20  # bytes hashed at a time


class AppendResult(Enum):
    """What became of a blob that a piece was added to."""

    INCOMPLETE = "more"  # not whole yet
    COMPLETE = "whole"  # checked, fsynced, and under its name
    CORRUPT = "damaged"  # all bytes came and are not what the digest says; thrown away


class BlobStore:
    def __init__(self, folder: Path, fresh: bool = False, sweep: bool = True):
        """`fresh`: empty to begin with, whatever was left there. `sweep` False: another process may be writing here,
        and what looks left over is not."""
        self.folder = folder
        self._growing = threading.Lock()
        self._held: Counter[str] = (
            Counter()
        )  # digests that somebody relies on, whatever becomes of others
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        if not sweep:
            return
        for leftover in folder.glob("*/*.new"):
            leftover.unlink(missing_ok=True)
        for part in folder.glob("*/*.part"):
            if part.stat().st_mtime < time.time() - MAX_PARTIAL_AGE:
                part.unlink(missing_ok=True)

    def path(self, digest: str) -> Path:
        """Where a blob lies, or would. `digest` has been checked to be 64 hex digits."""
        assert len(digest) == 64
        return self.folder / digest[:2] / digest

    def has(self, digest: str) -> bool:
        return digest == EMPTY_DIGEST or self.path(digest).exists()

    def size(self, digest: str) -> int | None:
        """Bytes, or None where there is no such blob."""
        if digest == EMPTY_DIGEST:
            return 0
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            return None

    def read(self, digest: str, offset: int = 0, size: int = -1) -> bytes:
        """`size` bytes from `offset` on (all by default). Raises FileNotFoundError."""
        if digest == EMPTY_DIGEST:
            return b""
        with self.path(digest).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def store(self, data: bytes | memoryview, hold: bool = False) -> str:
        """Keeps bytes durably; returns their digest. What was here already is not written again. `hold`: until
        `release`, they are not let go."""
        digest = blake3(data).hexdigest()
        if hold:
            self.pin([digest])
        if not self.has(digest):
            self._keep(digest, data)
        return digest

    def _keep(self, digest: str, data: bytes | memoryview) -> None:
        """Bytes that are what their digest says. Nothing stays of them where the disk refuses."""
        path = self._shelved(digest)
        fresh = path.with_name(f"{digest}.{secrets.token_hex(4)}.new")
        try:
            fresh.write_bytes(data)
            move_into_place(fresh, path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise

    def read_verified(self, digest: str) -> bytes | None:
        """A blob's bytes, if they are here and what their name says."""
        try:
            data = self.read(digest)
        except FileNotFoundError:
            return None
        return data if blake3(data).hexdigest() == digest else None

    def _shelved(self, digest: str) -> Path:
        """Where a blob will lie, its folder made. The folder's own name is made durable, too: the blob is in it."""
        path = self.path(digest)
        if not path.parent.exists():
            path.parent.mkdir(exist_ok=True)
            sync_folder(self.folder)
        return path

    def partial_size(self, digest: str) -> int:
        """Bytes here of a blob that is still arriving."""
        try:
            return self._part(digest).stat().st_size
        except FileNotFoundError:
            return 0

    def append_piece(
        self, digest: str, offset: int, data: bytes | memoryview, total: int
    ) -> AppendResult:
        """Adds a piece of a blob of `total` bytes. A piece that does not continue what is here is let go by."""
        with self._growing:
            return self._extend(digest, offset, data, total)

    def _extend(
        self, digest: str, offset: int, data: bytes | memoryview, total: int
    ) -> AppendResult:
        if self.has(digest):
            return AppendResult.COMPLETE
        part, length = self._part(digest), self.partial_size(digest)
        if (
            offset == length == 0 and len(data) == total
        ):  # whole in one piece, as most updates of small models are
            if blake3(data).hexdigest() != digest:
                return AppendResult.CORRUPT
            self._keep(digest, data)
            return AppendResult.COMPLETE
        self._shelved(digest)
        if offset <= length < offset + len(data):
            with part.open("ab") as file:
                file.write(data[length - offset :])
            length = offset + len(data)
        if length < total:
            return AppendResult.INCOMPLETE
        if length > total or _digest(part) != digest:
            part.unlink()
            return AppendResult.CORRUPT
        move_into_place(part, self.path(digest))
        return AppendResult.COMPLETE

    def delete(self, digest: str) -> None:
        """Forgets a blob, whole or in part."""
        self.path(digest).unlink(missing_ok=True)
        self._part(digest).unlink(missing_ok=True)

    def pin(self, digests: Iterable[str]) -> None:
        """Keeps these from being let go, here or not, until they are released as often."""
        with self._growing:
            self._held.update(digests)

    def unpin(self, digests: Iterable[str]) -> None:
        with self._growing:
            self._held -= Counter(digests)

    def remove_unless_pinned(self, digest: str) -> bool:
        """Forgets a whole blob unless somebody holds it; whether it did."""
        with self._growing:
            if not self._held[digest]:
                self.path(digest).unlink(missing_ok=True)
            return not self._held[digest]

    def discard_partial(self, digest: str) -> None:
        """Forgets what has come of a blob that nobody waits for any more; a whole one stays."""
        with self._growing:
            self._part(digest).unlink(missing_ok=True)

    def _part(self, digest: str) -> Path:
        return self.path(digest).with_suffix(".part")


def _digest(path: Path) -> str:
    hasher = blake3()
    with path.open("rb") as file:
        while data := file.read(_READ):
            hasher.update(data)
    return hasher.hexdigest()
