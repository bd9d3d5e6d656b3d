"""Read the documents of one file, whatever its format, and report what was found.

Plain text, JSON and CSV are read here, line by line, so that a damaged line or an encoding can be
named. `datasets` reads Parquet and Arrow files.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from barnraise.errors import TextError, TextUnreachableError
from barnraise.formats import format_share
from barnraise.text.connection_errors import is_connection_error
from barnraise.text.decompression import OpenFile, Peekable, damage_named, open_decompressed
from barnraise.text.documents import PIECE_CHARACTERS, cut_stream
from barnraise.text.encoding import DecodingCounts, decode_stream, has_too_many
from barnraise.text.extra import needs_extra
from barnraise.text.file_choice import LeftOut
from barnraise.text.file_format import (
    ARROW,
    CSV,
    HEAD_BYTES,
    JSON,
    JSON_LINES,
    PARQUET,
    TEXT,
    TSV,
    find_format,
)
from barnraise.text.private_keys import refuse_private_keys
from barnraise.text.rows import (
    MAX_SKIPPED_SHARE,
    SAMPLE_CHARACTERS,
    SAMPLE_ROWS,
    Row,
    RowCounts,
    RowOptions,
    choose_dialect,
    parse_csv,
    parse_json,
    parse_json_lines,
    read_texts,
    refuse_repeated,
)

MAX_LINE_CHARACTERS = 256 << 20  # of a line, which lies in memory
MAX_JSON_CHARACTERS = 1 << 30  # of a JSON document that is not in lines
TABLE_BATCH_ROWS = 256
# Types of text, and of the same bytes.
BYTES_OF = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}
TEXT_DTYPES = (*BYTES_OF, *BYTES_OF.values())
LIST_FEATURES = ("List", "LargeList", "Sequence", "list", "Json")  # of `datasets`


@dataclass(frozen=True)
class SourceFile:
    """A file that may hold text.

    Attributes:
        path: how it is shown.
        open: opens its bytes.
        location: a path or hf:// address that `datasets` can open; "" if there is none.
        size: its bytes.
        explicit: whether it was named itself, not found in a folder.
        column: the column with the text, if one was named.
    """

    path: str
    open: OpenFile
    location: str = ""
    size: int = 0
    explicit: bool = False
    column: str = ""

    def leave_out(self, problem: str) -> LeftOut:
        """Leave the file out for a problem.

        Raises:
            TextError: the file was named itself.
        """
        if self.explicit:
            raise TextError(_problem_sentence(self.path, problem))
        return LeftOut(self.path, problem.removeprefix(self.path).lstrip(": "))


@dataclass
class FileReport:
    """What was read from a file.

    Attributes:
        path: how the file is shown.
        format: "text", "jsonl", "json", "csv", "tsv", "parquet" or "arrow".
        encoding: of its characters.
        documents: rows with text; of a plain text the pieces that it is cut into.
        bytes: of the text in UTF-8.
        characters: of the text.
        skipped_rows: rows without a usable text.
        warnings: sentences for people.
    """

    path: str
    format: str = ""
    encoding: str = "utf-8"
    documents: int = 0
    bytes: int = 0
    characters: int = 0
    skipped_rows: int = 0
    warnings: list[str] = field(default_factory=list)

    def add_warnings(self, sentences: Iterable[str]) -> None:
        """Add sentences about the file to the warnings."""
        self.warnings += [f"{self.path}: {sentence}" for sentence in sentences]


class Piece(NamedTuple):
    """A piece of a document.

    Attributes:
        text: its characters, with LF as line ends.
        is_last: whether the document ends with it.
        has_marks: whether it spells special tokens by their numbers, as rendered chats do.
    """

    text: str
    is_last: bool = True
    has_marks: bool = False


def read_file(
    file: SourceFile, report: FileReport, options: RowOptions, scratch: Path | None = None
) -> Iterator[Piece]:
    """Yield a file's documents in pieces; fill in the report. `scratch` is for temporary copies.

    Raises:
        TextError: one sentence that begins with the file's name.
    """
    try:
        with damage_named(file.path):
            stream = open_decompressed(file.open)
            try:
                yield from _count_pieces(
                    _read_stream(file, stream, report, options, scratch), report
                )
            finally:
                stream.close()
    except TextError as error:
        raise type(error)(_problem_sentence(file.path, str(error))) from None


def _problem_sentence(path: str, problem: str) -> str:
    return problem if problem.startswith(path) else f"{path}: {problem}"


def _count_pieces(pieces: Iterable[Piece], report: FileReport) -> Iterator[Piece]:
    for piece in pieces:
        report.documents += 1
        report.characters += len(piece.text)
        report.bytes += len(piece.text) if piece.text.isascii() else len(piece.text.encode())
        yield piece


def _read_stream(
    file: SourceFile,
    stream: Peekable,
    report: FileReport,
    options: RowOptions,
    scratch: Path | None,
) -> Iterator[Piece]:
    head = stream.peek_bytes(HEAD_BYTES)
    report.format = find_format(file.path, head)
    if report.format in (PARQUET, ARROW):
        with _local_copy(file, stream, scratch) as location:
            yield from _read_table(location, report, options, scratch)
        return
    if report.format == TEXT and options.column:
        raise TextError(f"it is plain text, which has no column '{options.column}'")
    decoding = DecodingCounts(is_rows=report.format != TEXT)
    texts = decode_stream(stream, decoding)
    if report.format == TEXT:
        yield from _read_text(texts)
    else:
        counts = RowCounts()
        rows = _parse_rows(report.format, texts, options, counts)
        for text in read_texts(rows, options, counts):
            yield Piece(text, has_marks=counts.is_chat)
        _report_rows(counts, report)
    report.encoding = decoding.encoding
    report.add_warnings(_decoding_warnings(decoding))


# ---- plain text --------------------------------------------------------------------------------


def _read_text(texts: Iterable[str]) -> Iterator[Piece]:
    """Yield a text in pieces; refuse white space only, and private keys."""
    previous = ""
    has_text = False
    for piece in refuse_private_keys(cut_stream(texts, PIECE_CHARACTERS)):
        if previous:
            yield Piece(previous, is_last=False)
        has_text = has_text or not piece.isspace()
        previous = piece
    if not has_text:
        raise TextError("it holds nothing but white space")
    yield Piece(previous)


# ---- rows --------------------------------------------------------------------------------------


def _parse_rows(
    kind: str, texts: Iterator[str], options: RowOptions, counts: RowCounts
) -> Iterator[Row]:
    if kind == JSON_LINES:
        return parse_json_lines(split_lines(texts), counts)
    if kind in (CSV, TSV):
        first = next(texts, "")
        dialect = choose_dialect(kind, first[:SAMPLE_CHARACTERS], options.column)
        return parse_csv(split_lines(chain([first], texts), keep_ends=True), dialect, counts)
    assert kind == JSON
    return parse_json(_join(texts), counts)


def split_lines(texts: Iterable[str], keep_ends: bool = False) -> Iterator[str]:
    """Split a text that arrives in parts at its line ends, and nowhere else.

    Raises:
        TextError: a line is too long to be text.
    """
    end = "\n" if keep_ends else ""
    parts: list[str] = []
    size = 0
    for text in texts:
        *lines, rest = text.split("\n")
        for line in lines:
            yield "".join([*parts, line, end])
            parts = []
            size = 0
        parts.append(rest)
        size += len(rest)
        if size > MAX_LINE_CHARACTERS:
            raise TextError(f"it has a line of more than {MAX_LINE_CHARACTERS / 1e6:,.0f} MB")
    if last := "".join(parts):
        yield last


def _join(texts: Iterable[str]) -> str:
    parts: list[str] = []
    size = 0
    for text in texts:
        parts.append(text)
        size += len(text)
        if size > MAX_JSON_CHARACTERS:
            raise TextError("it is too large to be read at once: convert it to JSON lines (.jsonl)")
    return "".join(parts)


def _report_rows(counts: RowCounts, report: FileReport) -> None:
    report.skipped_rows = counts.skipped + counts.damaged + bool(counts.cut_line)
    report.add_warnings(_row_warnings(counts))
    if has_too_many(counts.bad_characters, report.characters):
        share = format_share(counts.bad_characters / report.characters)
        raise TextError(
            f"{share} of its characters are lone surrogates, which no encoding can hold"
        )


def _row_warnings(counts: RowCounts) -> Iterator[str]:
    """Yield a sentence for each fault of the rows."""
    if counts.skipped > MAX_SKIPPED_SHARE * counts.rows:
        share = format_share(counts.skipped / counts.rows)
        yield (
            f"{counts.skipped:,} of {counts.rows:,} rows ({share}) have no text in the column "
            f"'{counts.column}' and are skipped"
        )
    if not counts.has_names:
        yield (
            "its first line does not look like names of columns and is read as a row; the columns "
            "are called column1, column2, …"
        )
    if counts.refused_chats:
        yield f"{counts.refused_chats:,} rows are skipped: {counts.chat_problem}"
    if counts.nested:
        yield (
            f"its text is the column '{counts.column}'; other columns hold lists or objects, which "
            f"are not read: {', '.join(counts.nested[:5])}"
        )
    if counts.damaged:
        yield f"rows that cannot be read are skipped: {counts.describe_damage()}"
    if counts.rows_with_keys:
        yield f"rows that hold private keys are skipped: {counts.rows_with_keys:,}"
    if counts.cut_line:
        yield f"line {counts.cut_line:,}, the last one, is cut off and is skipped"
    if counts.bad_characters:
        yield (
            "characters that no encoding can hold (lone surrogates) are replaced by U+FFFD: "
            f"{counts.bad_characters:,}"
        )


def _decoding_warnings(decoding: DecodingCounts) -> Iterator[str]:
    """Yield a sentence for each fault of the encoding."""
    if decoding.is_guess:
        yield f"it is not UTF-8; it was read as {decoding.encoding}, by its content"
    if decoding.bad_bytes:
        yield (
            f"bytes that are not {decoding.encoding.upper()} are replaced by U+FFFD: "
            f"{decoding.bad_bytes:,}"
        )


# ---- Parquet and Arrow -------------------------------------------------------------------------


@contextmanager
def _local_copy(file: SourceFile, stream: Peekable, scratch: Path | None) -> Iterator[str]:
    """Return where `datasets` can open the table: at its location, or in a temporary copy."""
    if file.location and not stream.is_decompressed:
        yield file.location
        return
    with tempfile.TemporaryDirectory(prefix="barnraise-", dir=scratch) as folder:
        path = Path(folder) / "table"
        with path.open("wb") as copy:
            while data := stream.read(1 << 20):
                copy.write(data)
        yield str(path)


def load_datasets() -> Any:
    """Import `datasets`, which takes seconds.

    Raises:
        TextError: the extra is not installed.
    """
    # Reading a file must not be counted at the hub.
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    with needs_extra("this machine cannot read such text"):
        import datasets
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def _read_table(
    location: str, report: FileReport, options: RowOptions, scratch: Path | None
) -> Iterator[Piece]:
    """Read the column of text of a Parquet or Arrow file, a few rows at a time."""
    datasets = load_datasets()
    from pyarrow import parquet

    counts = RowCounts()

    def open_table(columns: list[str] | None = None) -> Any:
        # Its own cache may be a folder that cannot be written, or none.
        settings: dict[str, Any] = {"cache_dir": str(scratch)} if scratch else {}
        if report.format == PARQUET:
            settings |= {"batch_size": TABLE_BATCH_ROWS, "columns": columns}
        table = datasets.load_dataset(
            report.format, data_files=[location], split="train", streaming=True, **settings
        )
        if report.format == ARROW and columns:
            table = table.select_columns(columns)
        return table

    def read_rows(columns: list[str]) -> Iterator[Row]:
        return _decode_rows(open_table(columns), {name: features[name] for name in columns})

    with _table_errors(report):
        if report.format == PARQUET and "://" not in location:
            columns = parquet.read_schema(location).names  # `datasets` reads no repeated ones
            refuse_repeated(columns, max(columns, key=columns.count, default=""))
        features = open_table().features
        names = tuple(features)
        candidates = [name for name in names if _may_hold_text(features[name])]
        wanted = options.column.partition(".")[0]
        if options.column in names or wanted in names:
            candidates = [options.column if options.column in names else wanted]
        elif options.column:
            raise TextError(
                f"it has no column '{options.column}'; its columns are {', '.join(names[:20])}"
            )
        if not candidates:
            raise TextError(f"no column holds text; its columns are {', '.join(names[:20])}")
        options = RowOptions(options.column, options.render_chat, names)
        if len(candidates) > 1:
            sample = RowCounts()
            first = islice(read_rows(candidates), SAMPLE_ROWS)
            for _ in read_texts(first, options, sample):
                pass
            candidates = [sample.column]
            options = RowOptions(sample.column, options.render_chat, names)
            counts.nested = sample.nested
        for text in read_texts(read_rows(candidates), options, counts):
            yield Piece(text, has_marks=counts.is_chat)
    _report_rows(counts, report)


def _decode_rows(table: Any, features: dict[str, Any]) -> Iterator[Row]:
    """Read rows of a table; pyarrow refuses its texts where bytes are not UTF-8."""
    datasets = load_datasets()

    def replace_texts(feature: Any) -> Any:
        if isinstance(feature, dict):
            return {name: replace_texts(part) for name, part in feature.items()}
        if isinstance(feature, datasets.List | datasets.LargeList):
            return type(feature)(replace_texts(feature.feature))
        kind = BYTES_OF.get(getattr(feature, "dtype", ""))
        return datasets.Value(kind) if kind else feature

    texts = {name: replace_texts(feature) for name, feature in features.items()}
    texts = {name: feature for name, feature in texts.items() if feature != features[name]}
    for name, feature in texts.items():
        table = table.cast_column(name, feature)
    for row in table:
        yield {**row, **{name: _decode(row[name]) for name in texts}}


def _decode(value: Any) -> Any:
    """Return a value with texts in place of bytes."""
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    if isinstance(value, list):
        return [_decode(part) for part in value]
    return {n: _decode(part) for n, part in value.items()} if isinstance(value, dict) else value


def _may_hold_text(feature: Any) -> bool:
    """Return whether a column's type is one of text, bytes, or lists, which may be chats."""
    return getattr(feature, "dtype", "") in TEXT_DTYPES or type(feature).__name__ in LIST_FEATURES


@contextmanager
def _table_errors(report: FileReport) -> Iterator[None]:
    """Turn what `datasets` and pyarrow raise into one sentence."""
    try:
        yield
    except (TextError, GeneratorExit):
        raise
    except Exception as error:  # datasets wraps errors of many libraries
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = (str(cause) or type(cause).__name__).splitlines()[0][:200]
        if report.path.startswith("hf:") and is_connection_error(error):
            raise TextUnreachableError(f"cannot be read: {reason}") from None
        raise TextError(
            f"cannot be read as {'a Parquet' if report.format == PARQUET else 'an Arrow'} file: "
            f"{reason}"
        ) from None
