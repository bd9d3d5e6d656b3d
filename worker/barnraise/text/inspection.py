"""Inspect a text before it is shared: what is read, what is left out, and what is in it."""

import heapq
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from blake3 import blake3

from barnraise.errors import TextError, TextUnreachableError
from barnraise.formats import format_bytes
from barnraise.spec import MAX_VOCABULARY
from barnraise.text.file_choice import LeftOut
from barnraise.text.progress import ReportProgress, ignore_progress
from barnraise.text.reading import TextSource
from barnraise.text.round_trip import measure_round_trip
from barnraise.text.shards import TextPlan, check_length
from barnraise.text.source_file import FileReport, Piece
from barnraise.text.tokenizer import load_tokenizer, train_tokenizer

SAMPLES = 10  # documents whose first lines are shown
SAMPLE_CHARACTERS = 600
TOKEN_SAMPLE_BYTES = 1 << 20  # of the text by which the tokens are estimated
REMOTE_BYTES = 64 << 20  # of each remote file that is read for a preview
SMALLEST_CONTEXT = 8  # that a run can have
USUAL_CONTEXT = 128  # of the smallest preset
MAX_LOST_SHARE = 0.001  # of the characters, by tokens and back, above which a warning is due
STAGE = "inspecting"


@dataclass
class Inspection:
    """What an inspection found.

    Attributes:
        files: that are read.
        left_out: files and folders that are not, with the reasons.
        documents: without copies.
        bytes: of these documents in UTF-8.
        characters: of these documents.
        duplicates: documents that are copies of another one.
        tokens: estimated by a sample.
        round_trip: how much of the sample does not come back from its tokens, as a sentence.
        skipped_rows: rows without a usable text.
        unusable_files: files of text formats that turned out to be unusable.
        samples: the beginnings of some documents, for the owner's eyes only.
        warnings: sentences for people.
        refusal: why the text cannot be used; "" if it can.
    """

    files: list[FileReport] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    documents: int = 0
    bytes: int = 0
    characters: int = 0
    duplicates: int = 0
    tokens: int = 0
    round_trip: str = ""
    skipped_rows: int = 0
    unusable_files: int = 0
    samples: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    refusal: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the inspection for programs; a refusal is the last warning."""
        return {
            "files": [
                {
                    "path": file.path,
                    "format": file.format,
                    "documents": file.documents,
                    "bytes": file.bytes,
                }
                for file in self.files
            ],
            "skipped": [{"path": item.path, "reason": item.reason} for item in self.left_out],
            "documents": self.documents,
            "bytes": self.bytes,
            "duplicates": self.duplicates,
            "warnings": [*self.warnings, *([self.refusal] if self.refusal else [])],
        }


class _Sampler:
    """Choose documents at random, by the hashes of their contents."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, str]] = []
        self._text_heap: list[tuple[int, int, bytes]] = []
        self._text_bytes = 0

    def add(self, key: int, text: str) -> None:
        """Consider a document, by its first piece."""
        entry = (-key, text[:SAMPLE_CHARACTERS])
        if entry in self._heap:
            return
        if len(self._heap) < SAMPLES:
            heapq.heappush(self._heap, entry)
        elif entry > self._heap[0]:
            heapq.heapreplace(self._heap, entry)
        if self._text_bytes < TOKEN_SAMPLE_BYTES or -key > self._text_heap[0][0]:
            content = text.encode()[: TOKEN_SAMPLE_BYTES // 16]
            heapq.heappush(self._text_heap, (-key, self._text_bytes, content))
            self._text_bytes += len(content)
            while self._text_bytes - len(self._text_heap[0][2]) >= TOKEN_SAMPLE_BYTES:
                self._text_bytes -= len(heapq.heappop(self._text_heap)[2])

    @property
    def beginnings(self) -> list[str]:
        """Return the beginnings of the chosen documents."""
        return [text for _, text in sorted(self._heap, reverse=True)]

    @property
    def contents(self) -> list[bytes]:
        """Return parts of documents, to learn a tokenizer from."""
        return [content for _, _, content in sorted(self._text_heap, reverse=True)]


def inspect_source(
    source: TextSource,
    plan: TextPlan,
    progress: ReportProgress = ignore_progress,
) -> Inspection:
    """Read a text once and describe it. A text that cannot be used is described as far as read."""
    inspection = Inspection()
    sampler = _Sampler()
    # Of each document 64 bits of its digest, and its bytes, characters and pieces.
    columns = (array("Q"), array("Q"), array("Q"), array("I"))
    try:
        for index in range(len(source.files)):
            _inspect_file(source, index, inspection, columns, sampler, progress)
        _summarise_documents(inspection, columns)
        _check(inspection, source, plan)
        inspection.tokens = _estimate_tokens(sampler.contents, inspection, plan)
    except TextError as error:
        inspection.refusal = str(error)
    inspection.warnings = list(dict.fromkeys([*source.warnings, *inspection.warnings]))
    inspection.left_out = sorted(source.left_out, key=lambda item: item.path)
    if inspection.unusable_files:
        named = ", ".join(item.path for item in source.left_out[-inspection.unusable_files :][:5])
        inspection.warnings.append(
            f"{inspection.unusable_files:,} "
            f"{'file' if inspection.unusable_files == 1 else 'files'} of text formats cannot be "
            "used and are left out: "
            f"{named}{', …' if inspection.unusable_files > 5 else ''}"
        )
    inspection.samples = sampler.beginnings
    return inspection


def _inspect_file(
    source: TextSource,
    index: int,
    inspection: Inspection,
    columns: tuple[array, ...],
    sampler: _Sampler,
    progress: ReportProgress,
) -> None:
    """Read one file; leave it out if it is unusable and was not named itself."""
    file = source.files[index]
    report = FileReport(file.path)
    before = len(columns[0])
    done = sum(earlier.size for earlier in source.files[:index])
    try:
        pieces = source.read(index, report)
        for key, first, totals in _read_documents(pieces):
            for column, value in zip(columns, (key, *totals), strict=True):
                column.append(value)
            sampler.add(key, first)
            progress(STAGE, done + min(report.bytes, file.size), source.size)
            if file.location.startswith("hf://") and report.bytes > REMOTE_BYTES:
                inspection.warnings.append(
                    f"{file.path}: only the first {format_bytes(report.bytes)} were read; "
                    f"the file has {format_bytes(file.size)}"
                )
                pieces.close()
                break
    except TextUnreachableError:
        raise  # leaving the file out would change the text with the hub's state
    except TextError as error:
        for column in columns:
            del column[before:]
        source.leave_out(index, str(error))
        inspection.unusable_files += 1
        return
    inspection.files.append(report)
    inspection.warnings += report.warnings
    inspection.skipped_rows += report.skipped_rows


def _read_documents(
    pieces: Iterator[Piece],
) -> Iterator[tuple[int, str, tuple[int, int, int]]]:
    """Yield of each document 64 bits of its digest, its first piece, and its sizes."""
    hasher = blake3()
    first = ""
    totals = (0, 0, 0)
    for piece in pieces:
        content = piece.text.encode()
        hasher.update(content)
        first = first or piece.text
        totals = (totals[0] + len(content), totals[1] + len(piece.text), totals[2] + 1)
        if piece.is_last:
            key = int.from_bytes(hasher.digest(length=8), "big")
            yield key, first, totals
            hasher = blake3()
            first = ""
            totals = (0, 0, 0)


def _summarise_documents(inspection: Inspection, columns: tuple[array, ...]) -> None:
    """Count the documents without copies."""
    if not columns[0]:
        return
    keys, text_bytes, characters, pieces = (
        np.frombuffer(column, f"u{column.itemsize}") for column in columns
    )
    _, firsts = np.unique(keys, return_index=True)
    inspection.documents = int(pieces[firsts].sum(dtype=np.int64))
    inspection.duplicates = int(pieces.sum(dtype=np.int64)) - inspection.documents
    inspection.bytes = int(text_bytes[firsts].sum(dtype=np.int64))
    inspection.characters = int(characters[firsts].sum(dtype=np.int64))


def _check(inspection: Inspection, source: TextSource, plan: TextPlan) -> None:
    """Refuse what no run can use, and warn of what only a small one can."""
    if not inspection.files:
        raise TextError(_describe_nothing(source, inspection.unusable_files))
    if plan.context:
        check_length(inspection.bytes, plan.text.tokenizer, plan.context)
    else:
        check_length(inspection.bytes, "bytes", SMALLEST_CONTEXT)
        try:
            check_length(inspection.bytes, plan.text.tokenizer, USUAL_CONTEXT)
        except TextError as error:
            inspection.warnings.append(f"for the smallest preset {error}")


def _describe_nothing(source: TextSource, unusable: int) -> str:
    """Name what is left out, first the files that were tried."""
    first = len(source.left_out) - unusable
    items = [*source.left_out[first:], *source.left_out[:first]]
    reasons = [f"{item.path} ({item.reason})" for item in items[:5]]
    more = len(source.left_out) - len(reasons)
    if not reasons:
        return "there is no text: the folder has no files"
    rest = f" and {more:,} more" if more else ""
    return f"there is no text; left out: {', '.join(reasons)}{rest}"


def _estimate_tokens(sample: list[bytes], inspection: Inspection, plan: TextPlan) -> int:
    """Estimate the tokens of the text by those of a sample."""
    if plan.text.tokenizer == "bytes":
        return inspection.bytes + inspection.documents
    if plan.tokenizer_file is not None:
        tokenizer = load_tokenizer(plan.tokenizer_file, MAX_VOCABULARY, "the tokenizer")
    else:
        tokenizer = train_tokenizer(sample, plan.vocabulary)
    sample_bytes = sum(map(len, sample))
    measured = measure_round_trip(sample, tokenizer)
    inspection.round_trip = measured.sentence
    if measured.lost_share > MAX_LOST_SHARE:
        inspection.warnings.append(
            f"{measured.sentence}; take a byte-level tokenizer, or one of the text's language"
        )
    return int(measured.tokens * inspection.bytes / max(1, sample_bytes)) + inspection.documents
