"""Open files of text that may be compressed: gzip, zstd, bzip2, xz and zip.

Damage raises TextError with one sentence that names the file.
"""

import bz2
import gzip
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol, cast

from barnraise.errors import TextError
from barnraise.text.extra import needs_extra
from barnraise.text.file_format import HEAD_BYTES, ZIP, find_compression

MAX_NESTED = 3  # compressions of one file inside each other
ZSTD_PIECE_BYTES = 1 << 10  # compressed bytes at a time: each may stand for thousands
_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


class ByteStream(Protocol):
    """What can be read from its start to its end."""

    def read(self, size: int, /) -> bytes:
        """Read at most `size` bytes; b"" at the end."""
        ...

    def close(self) -> None:
        """Release the file below."""
        ...


OpenFile = Callable[[], ByteStream]


@contextmanager
def damage_named(name: str) -> Iterator[None]:
    """Turn what decompressors raise for damaged data into a TextError that names the file."""
    try:
        yield
    except (PermissionError, FileNotFoundError, IsADirectoryError) as error:
        raise TextError(f"{name} cannot be read: {error.strerror or error}") from None
    except _DAMAGE as error:
        reason = str(error).splitlines()[0][:200] if str(error) else "it ends too early"
        raise TextError(f"{name} is damaged or incomplete: {reason}") from None
    except (RuntimeError, NotImplementedError) as error:  # zipfile: encrypted, unknown method
        raise TextError(f"{name} cannot be read: {str(error)[:200]}") from None


def open_decompressed(open_file: OpenFile) -> "Peekable":
    """Open a file and decompress it, if its first bytes are those of a compressed one.

    A zip archive is returned as it is; see `open_archive`.
    """
    stream = Peekable(open_file())
    for _ in range(MAX_NESTED):
        compression = find_compression(stream.peek_bytes(16))
        if compression in ("", ZIP):
            break
        stream = Peekable(_decompress(stream, compression), is_decompressed=True)
    return stream


def _decompress(stream: "Peekable", compression: str) -> ByteStream:
    file = cast(BinaryIO, stream)  # the standard library's decompressors only read
    match compression:
        case "gzip":
            return cast(ByteStream, gzip.GzipFile(fileobj=file))
        case "bz2":
            return bz2.BZ2File(file)
        case "xz":
            return lzma.LZMAFile(file)
        case _:
            return _ZstdStream(stream)


class Peekable:
    """A stream whose first bytes can be read without consuming them.

    Attributes:
        is_decompressed: whether a file was compressed that is read as this stream.
    """

    def __init__(self, stream: ByteStream, is_decompressed: bool = False) -> None:
        self._stream = stream
        self.is_decompressed = is_decompressed
        self._head = b""

    def peek_bytes(self, size: int = HEAD_BYTES) -> bytes:
        """Return the next `size` bytes, or all that are left, without consuming them."""
        while len(self._head) < size:
            data = self._stream.read(size - len(self._head))
            if not data:
                break
            self._head += data
        return self._head[:size]

    def read(self, size: int = 1 << 16) -> bytes:
        """Read at most `size` bytes; b"" at the end."""
        if self._head:
            data = self._head[:size]
            self._head = self._head[size:]
            return data
        return self._stream.read(size)

    def close(self) -> None:
        """Close the stream below."""
        self._stream.close()


class _ZstdStream:
    """Decompress zstd frames one after another; a frame that is cut is an error, not the end."""

    def __init__(self, stream: ByteStream) -> None:
        with needs_extra("this machine cannot read zstd files"):
            import zstandard
        self._stream = stream
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._error = zstandard.ZstdError
        self._frame: Any = None
        self._compressed = b""
        self._output = b""

    def read(self, size: int = 1 << 16) -> bytes:
        """Read at most `size` bytes of the content; b"" at the end."""
        while not self._output:
            if not self._compressed:
                self._compressed = self._stream.read(1 << 16)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("it ends inside of a zstd frame")
                return b""
            self._output = self._decompress_piece()
        data = self._output[:size]
        self._output = self._output[len(data) :]
        return data

    def _decompress_piece(self) -> bytes:
        if self._frame is None:
            self._frame = self._decompressor.decompressobj()
        piece = self._compressed[:ZSTD_PIECE_BYTES]
        self._compressed = self._compressed[len(piece) :]
        try:
            data = self._frame.decompress(piece)
        except self._error as error:
            raise OSError(str(error)) from None
        if self._frame.eof:
            self._compressed = self._frame.unused_data + self._compressed
            self._frame = None
        return data

    def close(self) -> None:
        """Close the stream below."""
        self._stream.close()
