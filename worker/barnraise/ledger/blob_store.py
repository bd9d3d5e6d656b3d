"""Store files by the digest of their content.

They are update payloads, text shards and fragments of a snapshot.

A blob gets its name only once it is complete, verified and fsynced, so that a blob that is here is
still here after a crash. A blob that arrives in pieces grows in `<digest>.part` and continues from
there after an interruption. Concurrent writers of one blob are harmless: they write the same bytes.
"""

import contextlib
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from blake3 import blake3

from barnraise.durable_io import move_into_place, sync_folder, write_into_place

EMPTY_DIGEST = blake3(b"").hexdigest()  # of the blob without bytes, which always exists, as no file
MAX_PARTIAL_SECONDS = 86400.0  # without a new byte after which a partial blob is removed
_READ_BYTES = 1 << 20  # read at a time to compute a digest
_PART_LOCKS = 64  # of incomplete blobs, by digest


class AppendResult(Enum):
    """The state of a blob after a piece was appended."""

    INCOMPLETE = "incomplete"
    COMPLETE = "complete"  # verified, fsynced and under its name
    CORRUPT = "corrupt"  # all bytes arrived and do not match the digest; removed


class BlobStore:
    """A folder of blobs. Safe to use from several threads.

    Digests are BLAKE3, 64 hex digits; callers have validated them.
    """

    def __init__(self, folder: Path, fresh: bool = False, sweep: bool = True) -> None:
        """Open or create a folder of blobs.

        Args:
            folder: The folder.
            fresh: Whether to remove everything in the folder first.
            sweep: Whether to remove files that an interrupted process left. False if another
                process may be writing.
        """
        self.folder = folder
        # Appending waits for the disk, and the event loop must not wait for another blob's disk.
        self._part_locks = [threading.Lock() for _ in range(_PART_LOCKS)]
        self._pin_lock = threading.Lock()
        self._pins: Counter[str] = Counter()  # how often each digest is pinned
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        if sweep:
            self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        for unfinished in self.folder.glob("*/*.new"):
            unfinished.unlink(missing_ok=True)
        for part in self.folder.glob("*/*.part"):
            if part.stat().st_mtime < time.time() - MAX_PARTIAL_SECONDS:
                part.unlink(missing_ok=True)

    # ---- reading

    def path(self, digest: str) -> Path:
        """Return where a blob is or would be stored."""
        return Path(self._name(digest))

    def _name(self, digest: str) -> str:
        """Return the same as text.

        A `Path` interns its parts: with new names in each round, Python's table of such strings
        grows by megabytes in the midst of training.
        """
        assert len(digest) == 64
        return os.path.join(self.folder, digest[:2], digest)

    def has(self, digest: str) -> bool:
        """Return whether the complete blob is here."""
        return digest == EMPTY_DIGEST or os.path.exists(self._name(digest))

    def size(self, digest: str) -> int | None:
        """Return the blob's size in bytes; None if it is not here."""
        if digest == EMPTY_DIGEST:
            return 0
        try:
            return os.stat(self._name(digest)).st_size
        except FileNotFoundError:
            return None

    def read(self, digest: str, offset: int = 0, size: int = -1) -> bytes:
        """Read `size` bytes from `offset` on; by default all.

        Raises:
            FileNotFoundError: If the blob is not here.
        """
        if digest == EMPTY_DIGEST:
            return b""
        with open(self._name(digest), "rb") as file:
            file.seek(offset)
            return file.read(size)

    def read_verified(self, digest: str) -> bytes | None:
        """Read a blob and verify its digest; None if it is not here or damaged."""
        try:
            data = self.read(digest)
        except FileNotFoundError:
            return None
        return data if blake3(data).hexdigest() == digest else None

    def partial_size(self, digest: str) -> int:
        """Return how many bytes of an incomplete blob have arrived."""
        try:
            return os.stat(self._part_name(digest)).st_size
        except FileNotFoundError:
            return 0

    def partial_bytes(self) -> int:
        """Return the bytes of all incomplete blobs."""
        sizes = []
        for part in self.folder.glob("*/*.part"):
            with contextlib.suppress(FileNotFoundError):  # it was completed meanwhile
                sizes.append(part.stat().st_size)
        return sum(sizes)

    # ---- writing

    def store(self, data: bytes | memoryview, pin: bool = False) -> str:
        """Store bytes durably, unless they are here already.

        Returns:
            Its digest.
        """
        digest = blake3(data).hexdigest()
        if pin:
            self.pin([digest])
        if not self.has(digest):
            self._write(digest, data)
        return digest

    def append_piece(
        self, digest: str, offset: int, data: bytes | memoryview, total: int
    ) -> AppendResult:
        """Append a piece to a blob; ignore one that does not continue the bytes that are here."""
        with self._part_lock(digest):
            return self._append_piece(digest, offset, data, total)

    def _append_piece(
        self, digest: str, offset: int, data: bytes | memoryview, total: int
    ) -> AppendResult:
        if self.has(digest):
            return AppendResult.COMPLETE
        part = self._part_name(digest)
        length = self.partial_size(digest)
        # Most updates of small models arrive in one piece.
        if offset == length == 0 and len(data) == total:
            if blake3(data).hexdigest() != digest:
                return AppendResult.CORRUPT
            self._write(digest, data)
            return AppendResult.COMPLETE
        self._create_subfolder(digest)
        if offset <= length < offset + len(data):
            with open(part, "ab") as file:
                file.write(data[length - offset :])
            length = offset + len(data)
        if length < total:
            return AppendResult.INCOMPLETE
        if length > total or _compute_digest(part) != digest:
            os.unlink(part)
            return AppendResult.CORRUPT
        move_into_place(part, self._name(digest))
        return AppendResult.COMPLETE

    def _write(self, digest: str, data: bytes | memoryview) -> None:
        """Write bytes that match their digest; leave nothing if the disk refuses them."""
        self._create_subfolder(digest)
        name = self._name(digest)
        temporary = f"{name}.{secrets.token_hex(4)}.new"
        try:
            write_into_place(temporary, name, data)
        except OSError:
            _delete_if_there(temporary)
            raise

    def _create_subfolder(self, digest: str) -> None:
        """Create the folder of a blob durably."""
        folder = self.folder / digest[:2]
        if not folder.exists():
            folder.mkdir(exist_ok=True)
            sync_folder(self.folder)

    def _part_lock(self, digest: str) -> threading.Lock:
        return self._part_locks[int(digest[:4], 16) % _PART_LOCKS]

    def _part_name(self, digest: str) -> str:
        return f"{self._name(digest)}.part"

    # ---- removing

    def delete(self, digest: str) -> None:
        """Delete a blob, complete or not."""
        _delete_if_there(self._name(digest))
        _delete_if_there(self._part_name(digest))

    def pin(self, digests: Iterable[str]) -> None:
        """Keep `remove_unless_pinned` from removing these blobs, here already or not.

        A blob stays pinned until it has been unpinned as often as it was pinned.
        """
        with self._pin_lock:
            self._pins.update(digests)

    def unpin(self, digests: Iterable[str]) -> None:
        """Revoke one `pin` of each of these blobs."""
        with self._pin_lock:
            self._pins -= Counter(digests)

    def remove_unless_pinned(self, digest: str) -> bool:
        """Remove a complete blob unless it is pinned; return whether it was removed."""
        with self._pin_lock:
            if self._pins[digest]:
                return False
            _delete_if_there(self._name(digest))
            return True

    def discard_partial(self, digest: str) -> None:
        """Remove what has arrived of an incomplete blob; a complete one stays."""
        with self._part_lock(digest):
            _delete_if_there(self._part_name(digest))


def _delete_if_there(name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)


def _compute_digest(name: str) -> str:
    hasher = blake3()
    with open(name, "rb") as file:
        while data := file.read(_READ_BYTES):
            hasher.update(data)
    return hasher.hexdigest()
