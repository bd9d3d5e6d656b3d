"""A file read and written past the page cache in large aligned requests, and checksums."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from barnraise.errors import StateError
from barnraise.planning.plan import PAGE

# Bytes of a request to the disk: large enough for its full rate, small enough to share it with
# others.
REQUEST_BYTES = 8 << 20


def checksum(data: Tensor) -> int:
    """Return 64 bits over uint8 [n], n a multiple of 8, as fast as memory.

    Sums of 64-bit words by sectors of 4 KiB, each sector weighted by an odd number, mod 2**64.
    Finds flipped bits, and lost, stale and swapped sectors. Protects against accidents, not against
    attackers.
    """
    words = data.view(torch.int64)
    sectors = PAGE // 8
    whole = words.numel() // sectors * sectors
    sums = words[:whole].view(-1, sectors).sum(1)
    if whole < words.numel():
        sums = torch.cat((sums, words[whole:].sum().view(1)))
    weights = torch.arange(1, 2 * sums.numel(), 2, dtype=torch.int64)
    weights.mul_(0x5851F42D4C957F2D).bitwise_xor_(weights >> 29)
    return int(sums.mul_(weights | 1).sum().item()) & ((1 << 64) - 1)


def open_direct(path: Path | str, flags: int) -> tuple[int, bool]:
    """Open a file past the page cache if the system and the file system support O_DIRECT.

    Returns:
        Its descriptor, and whether it was opened with O_DIRECT.
    """
    flags |= getattr(os, "O_BINARY", 0)
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # which a file system in memory returns
                raise
    return os.open(path, flags, 0o600), False


class DirectFile:
    """A file of a fixed size that bypasses the page cache where the system permits it.

    Attributes:
        path: the file.
        size: its bytes.
        direct: whether it was opened with O_DIRECT.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Open or create the file, and reserve its space.

        Raises:
            StateError: names the folder, and the size if there is too little space.
        """
        self.path, self.size = path, size
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file, self.direct = open_direct(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise StateError(
                f"{path.parent} cannot hold the model's state: {error.strerror or error}"
            ) from None
        try:
            self._reserve(size)
        except OSError as error:
            os.close(self._file)
            reason = "is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
            raise StateError(
                f"{path.parent} {reason}: the model's state needs {size / 1e9:,.1f} GB there"
            ) from None

    def _reserve(self, size: int) -> None:
        if os.fstat(self._file).st_size >= size:
            return
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file, 0, size)
        else:
            os.ftruncate(self._file, size)

    def read(self, offset: int, target: Tensor) -> None:
        """Fill uint8 [n] from `offset`, both multiples of a page.

        Raises:
            OSError: the disk failed; names the file.
        """
        self._transfer(self.read_request, offset, target)

    def write(self, offset: int, data: Tensor) -> None:
        """Write uint8 [n] at `offset`, both multiples of a page.

        Raises:
            OSError: the disk failed; names the file.
        """
        self._transfer(self.write_request, offset, data)

    def _transfer(
        self, request: Callable[[memoryview, int], int], offset: int, data: Tensor
    ) -> None:
        """Repeat a request, which may transfer less, until all of `data` is read or written."""
        view = _memory_of(data)
        while len(view):
            with self._naming_file():
                count = request(view[:REQUEST_BYTES], offset)
            if count <= 0:
                raise OSError(errno.EIO, f"{self.path} ends at {offset}")
            offset += count
            view = view[count:]

    @contextlib.contextmanager
    def _naming_file(self) -> Iterator[None]:
        """Add the path to failures: those of an open file do not contain it."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(self.path)) from None

    if hasattr(os, "preadv"):

        def read_request(self, view: memoryview, offset: int) -> int:
            """Read up to len(view) bytes at `offset`; return their number."""
            return os.preadv(self._file, [view], offset)

        def write_request(self, view: memoryview, offset: int) -> int:
            """Write up to len(view) bytes at `offset`; return their number."""
            return os.pwritev(self._file, [view], offset)

    else:  # Windows has one position for all threads
        _position_lock = threading.Lock()

        def read_request(self, view: memoryview, offset: int) -> int:
            """Read up to len(view) bytes at `offset`; return their number."""
            with self._position_lock:
                os.lseek(self._file, offset, os.SEEK_SET)
                data = os.read(self._file, len(view))
            view[: len(data)] = data
            return len(data)

        def write_request(self, view: memoryview, offset: int) -> int:
            """Write up to len(view) bytes at `offset`; return their number."""
            with self._position_lock:
                os.lseek(self._file, offset, os.SEEK_SET)
                return os.write(self._file, view)

    def sync(self) -> None:
        """Wait until everything written would survive a power cut."""
        if hasattr(os, "fdatasync"):
            os.fdatasync(self._file)
        else:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _memory_of(data: Tensor) -> memoryview:
    """Return the memory of a host tensor, uint8 [n]."""
    array: Any = data.numpy()  # before Python 3.12 the buffer protocol cannot be annotated
    return memoryview(array)
