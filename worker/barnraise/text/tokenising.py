"""Tokenise the pieces of a spool on all cores, and continue after a kill.

train.tokens, held_out.tokens  the tokens so far, in the order of the pieces
tokenising.json                how much of both is durable, and for which tokenizer and split
"""

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from tokenizers import Tokenizer

from barnraise.durable_io import write_atomically
from barnraise.text.progress import ReportProgress, ignore_progress
from barnraise.text.spool import DocumentSpool, PieceTable, RowFile, open_at
from barnraise.text.tokenizer import encode_pieces

CHUNK_BYTES = 2 << 20  # of text that a process encodes at a time
POOL_BYTES = 24 << 20  # of text above which starting processes pays
QUEUE_LENGTH = 3  # chunks that wait, for each process
COMMIT_SECONDS = 5.0  # between two times that progress is made durable
PROGRESS_FILE = "tokenising.json"
_TOKEN_FILES = ("train.tokens", "held_out.tokens")
STAGE = "tokenising"


@dataclass(frozen=True)
class Chunk:
    """Consecutive pieces that one process encodes.

    Attributes:
        offset: where their content begins.
        lengths: bytes of each piece.
        parts: 0 for training, 1 for held out, 2 for a copy that is not used.
        ends: whether the end token follows.
        has_marks: whether it spells special tokens by their numbers.
    """

    offset: int
    lengths: npt.NDArray[np.uint32]
    parts: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.bool_]
    has_marks: npt.NDArray[np.bool_]


def tokenise(
    spool: DocumentSpool,
    table: PieceTable,
    held_out: npt.NDArray[np.bool_],
    tokenizer: Tokenizer | None,
    dtype: np.dtype,
    progress: ReportProgress = ignore_progress,
) -> tuple[RowFile, RowFile]:
    """Encode all pieces.

    Returns:
        The tokens of the training part and of the held-out part, stored in this type.
    """
    parts = np.where(table.used, held_out.astype(np.uint8), np.uint8(2))
    ends = _find_ends(table, parts)
    tokenizer_text = tokenizer.to_str() if tokenizer else ""
    identity = blake3(tokenizer_text.encode())
    identity.update(dtype.str.encode() if dtype.itemsize > 2 else b"")
    identity.update(parts.data)
    identity.update(table.lengths.view(np.uint8).data)
    output = _TokenFiles(spool.folder, identity.hexdigest(), dtype)
    total = int(table.lengths.sum(dtype=np.int64))
    with contextlib.closing(output):
        chunks = _cut_chunks(table, parts, ends, output.pieces)
        path = spool.folder / "documents.bin"
        done = int(table.lengths[: output.pieces].sum(dtype=np.int64))
        progress(STAGE, done, total)
        encoder = path, tokenizer_text, dtype
        for chunk, train, held in _encode_chunks(encoder, chunks, total - done):
            output.append(train, held, len(chunk.lengths))
            done += int(chunk.lengths.sum(dtype=np.int64))
            progress(STAGE, done, total)
    return output.token_files()


def _find_ends(table: PieceTable, parts: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Return after which pieces the end token follows.

    These are the last ones of documents, and those whose continuation is in the other part.
    """
    changes = np.ones(len(parts), np.bool_)
    changes[:-1] = parts[1:] != parts[:-1]
    return table.ends | changes


def _cut_chunks(
    table: PieceTable,
    parts: npt.NDArray[np.uint8],
    ends: npt.NDArray[np.bool_],
    first_piece: int,
) -> Iterator[Chunk]:
    """Yield chunks of about CHUNK_BYTES from a piece on."""
    begin = first_piece
    offset = int(table.lengths[:begin].sum(dtype=np.int64))
    while begin < len(parts):
        # At most so many pieces can be needed; looking at all of them each time would be slow.
        window = table.lengths[begin : begin + (1 << 16)]
        sizes = np.cumsum(window, dtype=np.int64)
        count = min(len(window), int(np.searchsorted(sizes, CHUNK_BYTES)) + 1)
        end = begin + count
        yield Chunk(
            offset, window[:count], parts[begin:end], ends[begin:end], table.has_marks[begin:end]
        )
        offset += int(sizes[count - 1])
        begin = end


def _encode_chunks(
    encoder: tuple[Path, str, np.dtype], chunks: Iterator[Chunk], size: int
) -> Iterator[tuple[Chunk, bytes, bytes]]:
    """Encode chunks, of `size` bytes of text, in their order; a long text in several processes."""
    processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    processes = processes or os.cpu_count() or 1
    if size < POOL_BYTES or processes == 1 or not encoder[1]:
        own = _ChunkEncoder(*encoder)
        for chunk in chunks:
            yield chunk, *own.encode(chunk)
        return
    with ProcessPoolExecutor(
        processes,
        multiprocessing.get_context("spawn"),
        _start_process,
        encoder,
    ) as pool:
        waiting: deque[tuple[Chunk, Future[tuple[bytes, bytes]]]] = deque()
        try:
            for chunk in chunks:
                waiting.append((chunk, pool.submit(_encode_in_process, chunk)))
                if len(waiting) > QUEUE_LENGTH * processes:
                    first, future = waiting.popleft()
                    yield first, *future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, *future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _ChunkEncoder:
    """Read and encode chunks of one file."""

    def __init__(self, path: Path, tokenizer_text: str, dtype: np.dtype) -> None:
        self._file = path.open("rb")
        self._dtype = dtype
        self._tokenizer = None
        if tokenizer_text:
            self._tokenizer = Tokenizer.from_str(tokenizer_text)
            self._tokenizer.encode_special_tokens = True

    def encode(self, chunk: Chunk) -> tuple[bytes, bytes]:
        """Return the tokens of the training and of the held-out pieces."""
        self._file.seek(chunk.offset)
        content = self._file.read(int(chunk.lengths.sum(dtype=np.int64)))
        ends = np.cumsum(chunk.lengths, dtype=np.int64).tolist()
        begins = [0, *ends[:-1]]
        streams: list[bytes] = []
        for part in (0, 1):
            tokens: list[bytes] = []
            for has_marks in (False, True):
                chosen = np.flatnonzero((chunk.parts == part) & (chunk.has_marks == has_marks))
                pieces = (
                    (content[begins[index] : ends[index]], bool(chunk.ends[index]))
                    for index in chosen.tolist()
                )
                encoded = encode_pieces(pieces, self._tokenizer, has_marks)
                tokens += [ids.astype(self._dtype).tobytes() for ids in encoded]
            streams.append(b"".join(tokens))
        return streams[0], streams[1]


_encoder: list[_ChunkEncoder] = []  # of this process of the pool


def _start_process(path: Path, tokenizer_text: str, dtype: np.dtype) -> None:
    """Load the tokenizer. Each process uses one core, and leaves Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder.append(_ChunkEncoder(path, tokenizer_text, dtype))


def _encode_in_process(chunk: Chunk) -> tuple[bytes, bytes]:
    return _encoder[0].encode(chunk)


class _TokenFiles:
    """The two files of tokens of one tokenizer and split, and how many pieces they hold durably."""

    def __init__(self, folder: Path, identity: str, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._paths = [folder / name for name in _TOKEN_FILES]
        self._progress_path = folder / PROGRESS_FILE
        self._identity = identity
        self.pieces = 0
        sizes = [0, 0]
        # Without the file nothing was encoded yet.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            saved = json.loads(self._progress_path.read_bytes())
            if saved["identity"] == identity:
                self.pieces = int(saved["pieces"])
                sizes = [int(size) for size in saved["sizes"]]
        self._files = [open_at(*place) for place in zip(self._paths, sizes, strict=True)]
        self._committed = time.monotonic()

    def append(self, train: bytes, held_out: bytes, pieces: int) -> None:
        """Append the tokens of so many pieces."""
        self._files[0].write(train)
        self._files[1].write(held_out)
        self.pieces += pieces
        if time.monotonic() - self._committed > COMMIT_SECONDS:
            self._commit()

    def _commit(self) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        saved = {
            "identity": self._identity,
            "pieces": self.pieces,
            "sizes": [file.tell() for file in self._files],
        }
        write_atomically(self._progress_path, json.dumps(saved).encode())
        self._committed = time.monotonic()

    def close(self) -> None:
        """Make everything durable."""
        self._commit()
        for file in self._files:
            file.close()

    def token_files(self) -> tuple[RowFile, RowFile]:
        """Return both files."""
        train, held_out = self._paths
        return RowFile(train, self._dtype), RowFile(held_out, self._dtype)
