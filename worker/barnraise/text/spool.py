"""Hold a text's documents on disk between reading and tokenising.

documents.bin  the pieces, one after another, in UTF-8
pieces.bin     the length of each piece (uint32); the two highest bits are flags
digests.bin    of each document the first 16 bytes of its BLAKE3, and its number of pieces
reading.json   how much of these is complete: after a kill, reading continues at the next file

Memory does not depend on the length of the text, except for about 20 bytes a piece.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from barnraise.durable_io import write_atomically
from barnraise.text.documents import PIECE_CHARACTERS, cut_stream
from barnraise.text.source_file import FileReport, Piece

FORMAT = 1
LAST_FLAG = 1 << 31  # the document ends with this piece
MARKS_FLAG = 1 << 30  # the piece spells special tokens by their numbers
LENGTH_MASK = MARKS_FLAG - 1
DIGEST_DTYPE = np.dtype([("high", ">u8"), ("low", ">u8"), ("pieces", "<u4")])
PIECE_DTYPE = np.dtype("<u4")
BUCKET_DOCUMENTS = 1 << 20  # documents whose digests are compared at a time
BLOCK = 1 << 20  # documents or pieces that are computed with at a time
READING_FILE = "reading.json"
_DATA_FILES = ("documents.bin", "pieces.bin", "digests.bin")


@dataclass
class SpoolState:
    """How much of the spool is complete.

    Attributes:
        fingerprint: of the source.
        files: files that were read, used or not.
        sizes: of the three data files, in bytes.
        reports: of the files that were used.
        left_out: the path and reason of files that turned out to be unusable.
        is_complete: whether all files were read.
    """

    fingerprint: str = ""
    files: int = 0
    sizes: list[int] = field(default_factory=lambda: [0, 0, 0])
    reports: list[FileReport] = field(default_factory=list)
    left_out: list[list[str]] = field(default_factory=list)
    is_complete: bool = False


class DocumentSpool:
    """The documents of one text, in a folder.

    Args:
        folder: created if it is missing; emptied if it holds another text.
        fingerprint: of the source, to recognise the same text after a kill.
    """

    def __init__(self, folder: Path, fingerprint: str = "") -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.state = self._load_state(fingerprint)
        self.was_resumed = bool(self.state.files)
        self._files: list[BinaryIO] = []
        self._hasher = blake3()
        self._document_pieces = 0
        if not self.state.is_complete:
            paths = [folder / name for name in _DATA_FILES]
            self._files = [open_at(*place) for place in zip(paths, self.state.sizes, strict=True)]

    def _load_state(self, fingerprint: str) -> SpoolState:
        path = self.folder / READING_FILE
        # Without the file nothing was read yet; another format is that of an older version.
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            raw = json.loads(path.read_bytes())
            if raw.pop("format") == FORMAT and raw["fingerprint"] == fingerprint:
                raw["reports"] = [FileReport(**report) for report in raw["reports"]]
                return SpoolState(**raw)
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        return SpoolState(fingerprint)

    # ---- writing

    def append(self, piece: Piece) -> bytes | None:
        """Append a piece; return the document's digest if it ends here.

        A long row is stored in pieces too, so that it can be sampled and split.
        """
        texts = [piece.text]
        if len(piece.text) > PIECE_CHARACTERS and not piece.has_marks:
            texts = list(cut_stream([piece.text]))
        documents, pieces, digests = self._files
        for number, text in enumerate(texts, 1):
            content = text.encode()
            is_last = piece.is_last and number == len(texts)
            flags = (LAST_FLAG if is_last else 0) | (MARKS_FLAG if piece.has_marks else 0)
            documents.write(content)
            pieces.write((len(content) | flags).to_bytes(4, "little"))
            self._hasher.update(content)
            self._document_pieces += 1
        if not piece.is_last:
            return None
        digest = self._hasher.digest(length=16)
        digests.write(digest + self._document_pieces.to_bytes(4, "little"))
        self._hasher = blake3()
        self._document_pieces = 0
        return digest

    def finish_file(self, report: FileReport | None, left_out: tuple[str, str] = ("", "")) -> None:
        """Make the documents of a file durable, or remove those of an unusable one."""
        if report is None:
            for file, size in zip(self._files, self.state.sizes, strict=True):
                file.seek(size)
                file.truncate()
            self._hasher = blake3()
            self._document_pieces = 0
            self.state.left_out.append(list(left_out))
        else:
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
            self.state.sizes = [file.tell() for file in self._files]
            self.state.reports.append(report)
        self.state.files += 1
        self._save_state()

    def finish(self) -> None:
        """Close the files: all documents are here."""
        self.close()
        self.state.is_complete = True
        self._save_state()

    def close(self) -> None:
        """Close the files without finishing."""
        for file in self._files:
            file.close()
        self._files = []

    def remove(self) -> None:
        """Remove the folder."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _save_state(self) -> None:
        raw = {
            **vars(self.state),
            "format": FORMAT,
            "reports": [vars(report) for report in self.state.reports],
        }
        write_atomically(self.folder / READING_FILE, json.dumps(raw).encode())

    # ---- reading

    @property
    def documents(self) -> "RowFile":
        """Return each document's digest and number of pieces."""
        return RowFile(self.folder / "digests.bin", DIGEST_DTYPE)

    @property
    def pieces(self) -> "RowFile":
        """Return each piece's length and flags."""
        return RowFile(self.folder / "pieces.bin", PIECE_DTYPE)

    def open_content(self) -> BinaryIO:
        """Open the pieces' content."""
        return (self.folder / "documents.bin").open("rb")


def open_at(path: Path, size: int) -> BinaryIO:
    """Open a file to write on after its first `size` bytes, and drop what follows them."""
    path.touch()
    file = path.open("r+b", buffering=1 << 20)
    file.truncate(size)
    file.seek(size)
    return file


@dataclass(frozen=True)
class RowFile:
    """Numbers in a file. They are read in blocks: mapped pages would count as memory.

    Attributes:
        path: the file.
        dtype: of a row.
    """

    path: Path
    dtype: np.dtype

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.path.stat().st_size // self.dtype.itemsize

    def read(self, begin: int, count: int) -> npt.NDArray[Any]:
        """Read at most `count` rows from `begin` on."""
        return np.fromfile(self.path, self.dtype, count, offset=begin * self.dtype.itemsize)

    def read_blocks(self) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
        """Yield all rows in blocks, each with its place."""
        for begin in range(0, len(self), BLOCK):
            rows = self.read(begin, BLOCK)
            yield slice(begin, begin + len(rows)), rows


def find_duplicates(documents: RowFile) -> npt.NDArray[np.bool_]:
    """Return which documents are copies of an earlier one.

    The digests, rows of `DIGEST_DTYPE`, are compared in buckets of their first bits, so that
    memory stays bounded.
    """
    duplicates = np.zeros(len(documents), np.bool_)
    buckets = 1
    while len(documents) > buckets * BUCKET_DOCUMENTS:
        buckets *= 2
    shift = np.uint64(64 - (buckets.bit_length() - 1))
    for bucket in range(buckets):
        chosen, rows = [np.empty(0, np.int64)], [np.empty(0, DIGEST_DTYPE)]
        for place, block in documents.read_blocks():
            here = np.arange(len(block))
            if buckets > 1:
                here = np.flatnonzero(block["high"].astype("u8") >> shift == bucket)
            chosen.append(place.start + here)
            rows.append(block[here])
        numbers, digests = np.concatenate(chosen), np.concatenate(rows)
        order = np.lexsort((numbers, digests["low"], digests["high"]))
        ordered = digests[order]
        same = (ordered["high"][1:] == ordered["high"][:-1]) & (
            ordered["low"][1:] == ordered["low"][:-1]
        )
        duplicates[numbers[order[1:][same]]] = True
    return duplicates


@dataclass(frozen=True)
class PieceTable:
    """All pieces of a text with what becomes of them.

    Attributes:
        lengths: bytes of each piece.
        ends: whether its document ends with it.
        has_marks: whether it spells special tokens by their numbers.
        used: whether it is in the text: copies are not.
        keys: random numbers that depend on nothing but the content, for a choice of pieces.
    """

    lengths: npt.NDArray[np.uint32]
    ends: npt.NDArray[np.bool_]
    has_marks: npt.NDArray[np.bool_]
    used: npt.NDArray[np.bool_]
    keys: npt.NDArray[np.uint64]

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the text without copies."""
        return int(np.sum(self.lengths, where=self.used, dtype=np.int64))

    def find_offsets(self, pieces: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return where the content of each of these pieces begins, in bytes."""
        offsets = np.zeros(len(pieces), np.int64)
        before = 0
        for begin in range(0, len(self.lengths), BLOCK):
            lengths = self.lengths[begin : begin + BLOCK]
            ends = before + np.cumsum(lengths, dtype=np.int64)
            here = np.flatnonzero((pieces >= begin) & (pieces < begin + BLOCK))
            places = pieces[here] - begin
            offsets[here] = ends[places] - lengths[places]
            before = int(ends[-1])
        return offsets


def build_table(spool: DocumentSpool, piece_characters: int = PIECE_CHARACTERS) -> PieceTable:
    """Describe the pieces of a spool; cut those that are longer than `piece_characters`."""
    used_documents = ~find_duplicates(spool.documents)
    counts = None  # of pieces, where they are not those of the spool
    if piece_characters < PIECE_CHARACTERS:
        counts, flags = _cut_again(spool, piece_characters)
    else:
        flags = spool.pieces.read(0, len(spool.pieces))
    lengths = flags & np.uint32(LENGTH_MASK)
    ends = flags & np.uint32(LAST_FLAG) != 0
    has_marks = flags & np.uint32(MARKS_FLAG) != 0
    del flags
    used = np.empty(len(lengths), np.bool_)
    keys = np.empty(len(lengths), np.uint64)
    begin = 0
    for place, block in spool.documents.read_blocks():
        block_counts = block["pieces"].astype(np.int64) if counts is None else counts[place]
        pieces = slice(begin, begin + int(block_counts.sum()))
        used[pieces] = np.repeat(used_documents[place], block_counts)
        keys[pieces] = np.repeat(block["high"].astype("u8"), block_counts)
        _mix_numbers(keys[pieces], block_counts)
        begin = pieces.stop
    return PieceTable(lengths, ends, has_marks, used, keys)


def _mix_numbers(keys: npt.NDArray[np.uint64], counts: npt.NDArray[np.int64]) -> None:
    """Give the pieces of a document different keys: BLAKE3 of the document's and their number."""
    begins = np.cumsum(counts) - counts
    for begin, count in zip(begins[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
        seed = int(keys[begin]).to_bytes(8, "big")
        mixed = blake3(seed).digest(length=8 * count)
        keys[begin : begin + count] = np.frombuffer(mixed, ">u8")


def _cut_again(
    spool: DocumentSpool, piece_characters: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """Cut the pieces of a short text further, so that a part of it can be held out.

    Returns:
        The number of pieces of each document, and each piece's length and flags.
    """
    new_flags: list[int] = []
    new_counts: list[int] = []
    pieces = iter(spool.pieces.read(0, len(spool.pieces)).tolist())
    counts = spool.documents.read(0, len(spool.documents))["pieces"].tolist()
    with spool.open_content() as content:
        for count in counts:
            before = len(new_flags)
            for _ in range(count):
                flag = next(pieces)
                text = content.read(flag & LENGTH_MASK)
                new_flags += _cut_piece(text, flag, piece_characters)
            new_counts.append(len(new_flags) - before)
    return np.array(new_counts, np.int64), np.array(new_flags, np.uint32)


def _cut_piece(content: bytes, flag: int, piece_characters: int) -> Iterator[int]:
    if flag & MARKS_FLAG:
        yield flag
        return
    lengths = [len(text.encode()) for text in cut_stream([content.decode()], piece_characters)]
    yield from lengths[:-1]
    yield lengths[-1] | (flag & LAST_FLAG)
