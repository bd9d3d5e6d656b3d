"""Read the rows of JSON, CSV, Parquet and Arrow files, and choose their column of text.

A row without a usable text is skipped and counted; a file without any is refused, with its columns.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple

from barnraise.errors import TextError
from barnraise.text.encoding import normalise_line_ends, replace_surrogates
from barnraise.text.file_format import CSV
from barnraise.text.private_keys import (
    HOLDS_PRIVATE_KEY,
    holds_private_key,
    is_first_line_of_key,
)

Row = Mapping[str, Any]
RenderChat = Callable[[list[dict[str, Any]]], str]  # raises TextError
USUAL_COLUMNS = ("text", "content")  # usual names of a column of text, the likelier first
CHAT_COLUMNS = ("messages", "conversations", "conversation")
SAMPLE_ROWS = 200  # by which the column is chosen
MAX_SKIPPED_SHARE = 0.05  # of a file's rows, above which a warning is due
MAX_FIELD_CHARACTERS = 256 << 20  # of a field of CSV
MAX_CUT_LINES = 100  # of a row of CSV whose quote is never closed; with more, others are in it
# A first line of CSV with a longer field, or one of more words, is a row and no line of names.
MAX_NAME_CHARACTERS = 64
MAX_NAME_WORDS = 5
# What can be wrong with the quotes of a row of CSV.
STRAY_QUOTE, OPEN_QUOTE = "a quote is closed in the middle of a field", "a quote is never closed"
_SEPARATOR_LINE = re.compile(r'"?sep=([^"\n])"?\n', re.I)  # spreadsheets write it


@dataclass
class RowCounts:
    """What reading rows found.

    Attributes:
        column: the column that was read.
        rows: all rows.
        skipped: rows without a usable text.
        bad_characters: characters that UTF-8 cannot hold, replaced by U+FFFD.
        cut_line: the number of a last line that is cut off; 0 if there is none.
        is_chat: whether the column holds chats.
        refused_chats: chats that the template refuses, which are skipped.
        chat_problem: why it refuses the first of them.
        nested: columns of lists or objects next to a column of text that has no usual name.
        has_names: whether the rows came with names of their columns.
        long_rows: rows of CSV with more fields than there are names, which are skipped.
        long_line: where the first of them ends.
        merged_lines: lines of CSV that a stray quote merges into one row, which is skipped.
        merged_line: where the first of these rows begins.
        rows_with_keys: rows that hold private keys, which are skipped.
    """

    column: str = ""
    rows: int = 0
    skipped: int = 0
    bad_characters: int = 0
    cut_line: int = 0
    is_chat: bool = False
    refused_chats: int = 0
    chat_problem: str = ""
    nested: tuple[str, ...] = ()
    has_names: bool = True
    long_rows: int = 0
    long_line: int = 0
    merged_lines: int = 0
    merged_line: int = 0
    rows_with_keys: int = 0

    def describe_long_rows(self) -> str:
        """Say how many rows have too many fields, and where the first is."""
        return (
            f"{self.long_rows:,} rows have more fields than there are names of columns, the first "
            f"in line {self.long_line:,}"
        )

    def describe_merged_lines(self) -> str:
        """Say how many lines a stray quote merges, and where the first of them is."""
        return (
            f"a quote in line {self.merged_line:,} is not closed at the end of its field, so that "
            f"{self.merged_lines:,} lines are no rows"
        )


@dataclass(frozen=True)
class RowOptions:
    """How rows become text.

    Attributes:
        column: the column with the text; "" to choose it.
        render_chat: turns a chat into text; None if the tokenizer has no chat template.
        names: all columns, where the rows have only some of them.
    """

    column: str = ""
    render_chat: RenderChat | None = None
    names: tuple[str, ...] = ()


# ---- parsing -----------------------------------------------------------------------------------


def parse_json_lines(lines: Iterable[str], counts: RowCounts) -> Iterator[Row]:
    """Parse one JSON object, or text, a line; skip a last line that is cut, and note its number.

    Raises:
        TextError: another line is not a JSON object; without the file's name.
    """
    bad_line = 0
    found = False
    for number, line in enumerate(lines, 1):
        line = line.removeprefix("\ufeff")  # files with marks may have been joined
        if not line.strip():
            continue
        if bad_line:
            break
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            bad_line = number
            continue
        if isinstance(row, str):
            row = {"text": row}
        if not isinstance(row, dict):
            raise TextError(f"line {number} is not a JSON object with named columns")
        found = True
        yield row
    else:
        if found or not bad_line:
            counts.cut_line = bad_line
            return
    raise TextError(f"line {bad_line} is not JSON")


def parse_json(text: str, counts: RowCounts) -> Iterator[Row]:
    """Parse a JSON document: a list of objects, one object, or an object that holds such a list.

    Objects that follow each other are rows too. A document that is cut off is read up to its last
    whole object.

    Raises:
        TextError: it is not JSON, or holds no objects.
    """
    try:
        document = json.loads(text)
    except RecursionError:
        raise TextError("its JSON is nested too deeply") from None
    except ValueError as error:
        yield from _parse_objects(text, counts, str(error))
        return
    yield from _find_rows(document)


def _find_rows(document: Any) -> Iterator[Row]:
    if isinstance(document, list):
        if not all(isinstance(row, dict) for row in document):
            if not all(isinstance(row, str) for row in document):
                raise TextError("its list holds values that are not objects with named columns")
            document = [{"text": row} for row in document]
        yield from document
    elif isinstance(document, dict):
        lists = {
            name: value
            for name, value in document.items()
            if isinstance(value, list) and value and all(isinstance(row, dict) for row in value)
        }
        usual = [name for name in ("data", "rows", "train", "examples") if name in lists]
        if len(lists) > 1 and not usual:
            raise TextError(f"it holds several lists of rows: {', '.join(sorted(lists)[:20])}")
        if usual or lists:
            yield from lists[(usual or list(lists))[0]]
        else:
            yield document
    else:
        raise TextError("it holds no objects with named columns")


def _parse_objects(text: str, counts: RowCounts, problem: str) -> Iterator[Row]:
    """Yield the whole objects of a list, or of a sequence, that may end too early."""
    decoder = json.JSONDecoder()
    position = len(text) - len(text.lstrip())
    is_list = text.startswith("[", position)
    between = " \t\n\r," if is_list else " \t\n\r\ufeff"
    position += is_list
    found = 0
    while True:
        while position < len(text) and text[position] in between:
            position += 1
        try:
            row, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict):
            break
        position = end
        found += 1
        yield row
    rest = text[position:].strip()
    if found and rest == ("]" if is_list else ""):
        return
    # Only the last object may be cut: what follows must not be the start of another one.
    if not found or "\n{" in rest[1:].replace(" ", ""):
        raise TextError(f"it is not JSON: {problem}")
    counts.cut_line = text.count("\n", 0, position) + 1


@dataclass(frozen=True)
class CsvDialect:
    """How a file of separated values is read.

    Attributes:
        kind: CSV or TSV.
        sample: the first characters, by which the delimiter and the quoting are recognised.
        column: the column with the text, if one was named.
    """

    kind: str
    sample: str
    column: str = ""

    @cached_property
    def delimiter(self) -> str:
        """Return what separates the fields of a row."""
        if self.kind != CSV:
            return "\t"
        return self.stated_delimiter or _find_delimiter(self.sample)

    @property
    def stated_delimiter(self) -> str:
        """Return the delimiter that a first line like "sep=;" states, or ""."""
        match = _SEPARATOR_LINE.match(self.sample)
        return match[1] if match and self.kind == CSV else ""

    @cached_property
    def has_plain_quotes(self) -> bool:
        """Return whether quotes are ordinary characters, because each line is a row.

        Most tab-separated texts are so: a word in quotes at a field's start may be closed in the
        middle of it, or not at all.
        """
        if self.kind == CSV:
            return False
        *lines, _ = self.sample.split("\n")
        tabs = {line.count("\t") for line in lines if line}
        return len(tabs) == 1 and tabs != {0}


class _CsvRow(NamedTuple):
    """A row of CSV: its fields, its lines, and the number of the first of these."""

    values: list[str]
    lines: list[str]
    number: int


class _CsvReader:
    """Yield the rows of CSV with the lines that each consists of.

    Attributes:
        line_number: of the last line that was read.
        row_number: of the last row.
    """

    def __init__(self, lines: Iterable[str], dialect: CsvDialect) -> None:
        self._lines = iter(lines)
        self._row: list[str] = []
        self.line_number = 0
        self.row_number = 0
        if dialect.stated_delimiter:
            next(self._lines, "")
            self.line_number = 1
        self._has_plain_quotes = dialect.has_plain_quotes
        quoting = csv.QUOTE_NONE if self._has_plain_quotes else csv.QUOTE_MINIMAL
        self._reader = csv.reader(
            self._read_lines(), delimiter=dialect.delimiter, quoting=quoting, strict=False
        )

    def _read_lines(self) -> Iterator[str]:
        for line in self._lines:
            self._row.append(line)
            self.line_number += 1
            yield line

    def __iter__(self) -> Iterator[_CsvRow]:
        for values in self._reader:
            lines, self._row = self._row, []
            if not values:  # a blank line
                continue
            self.row_number += 1
            if self._has_plain_quotes:
                values = [_strip_quotes(value) for value in values]
            yield _CsvRow(values, lines, self.line_number - len(lines) + 1)


def _strip_quotes(value: str) -> str:
    """Return a field without the quotes around it, if it is quoted as a whole."""
    inner = value[1:-1]
    if len(value) < 2 or value[0] != '"' or value[-1] != '"' or '"' in inner.replace('""', ""):
        return value
    return inner.replace('""', '"')


def parse_csv(lines: Iterable[str], dialect: CsvDialect, counts: RowCounts) -> Iterator[Row]:
    """Parse comma- or tab-separated values, in lines with their ends.

    The first line has the names of the columns, unless it looks like a row: then they are called
    column1, column2 and so on. A last row that is cut is skipped, and its line noted.

    Raises:
        TextError: the rows cannot be told apart.
    """
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    reader = _CsvReader(lines, dialect)
    rows = iter(reader)
    try:
        first = next(rows, None)
        if first is None:
            return
        counts.has_names = _looks_like_names(first.values, dialect.column)
        names = _unique_names(first.values if counts.has_names else [""] * len(first.values))
        waiting = None if counts.has_names else first
        is_last_checked = True
        for row in rows:
            if waiting is not None:
                yield dict(zip(names, waiting.values, strict=False))
            waiting = row if _accept_row(row, len(names), dialect, counts) else None
            is_last_checked = False
        _check_rows(counts, reader)
        if waiting is None:
            return
        if is_last_checked or not _is_cut(waiting, dialect, len(names)):
            yield dict(zip(names, waiting.values, strict=False))
        else:
            counts.cut_line = waiting.number
    except csv.Error as error:
        raise TextError(f"line {reader.line_number} cannot be read: {error}") from None


def _accept_row(row: _CsvRow, names: int, dialect: CsvDialect, counts: RowCounts) -> bool:
    """Count a row's faults; return whether it has no surplus fields and no lines of others."""
    if len(row.lines) > 1 and _quote_problem(row, dialect) == STRAY_QUOTE:
        counts.merged_lines += len(row.lines)
        counts.merged_line = counts.merged_line or row.number
        return False
    if any(row.values[names:]):
        counts.long_rows += 1
        counts.long_line = counts.long_line or row.number + len(row.lines) - 1
        return False
    return True


def _check_rows(counts: RowCounts, reader: _CsvReader) -> None:
    """Refuse a file with too many damaged rows; name the first of their lines."""
    if counts.merged_lines > MAX_SKIPPED_SHARE * reader.line_number:
        raise TextError(f"{counts.describe_merged_lines()}: double the quotes inside of texts")
    if counts.long_rows > MAX_SKIPPED_SHARE * reader.row_number:
        raise TextError(f"{counts.describe_long_rows()}: put texts with a delimiter into quotes")


def _looks_like_names(first: list[str], column: str) -> bool:
    """Return whether a first line of CSV has the names of columns, and is not a row itself."""
    folded = [name.strip().casefold() for name in first]
    if column in first or not {*USUAL_COLUMNS, *CHAT_COLUMNS}.isdisjoint(folded):
        return True
    if not any(folded):
        return False
    return not any(
        len(name) > MAX_NAME_CHARACTERS or len(name.split()) > MAX_NAME_WORDS or _is_number(name)
        for name in folded
    )


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _unique_names(names: list[str]) -> list[str]:
    """Return names without gaps and repetitions: "", "a", "a" → "column1", "a", "a_2"."""
    unique: list[str] = []
    for number, name in enumerate(names, 1):
        name = name if name.strip() else f"column{number}"
        unique.append(name if name not in unique else f"{name}_{number}")
    return unique


def _is_cut(last: _CsvRow, dialect: CsvDialect, names: int) -> bool:
    """Return whether the last row ends too early; refuse one whose open quote hides others."""
    if len(last.values) < names and not last.lines[-1].endswith("\n"):
        return True
    if _quote_problem(last, dialect) != OPEN_QUOTE:
        return False
    if len(last.lines) > MAX_CUT_LINES:
        raise TextError(f"line {last.number} opens a quote that is never closed")
    return True


def _quote_problem(row: _CsvRow, dialect: CsvDialect) -> str:
    """Return what is wrong with the quotes of a row: STRAY_QUOTE, OPEN_QUOTE or ""."""
    if dialect.has_plain_quotes:
        return ""
    try:
        list(csv.reader(row.lines, delimiter=dialect.delimiter, strict=True))
    except csv.Error as error:
        return OPEN_QUOTE if "unexpected end" in str(error) else STRAY_QUOTE
    return ""


def _find_delimiter(sample: str) -> str:
    """Return the delimiter that the line of names has most often outside of quotes."""
    names = sample.lstrip("\n").partition("\n")[0]
    while '"' in names and names.count('"') > 1:
        before, _, rest = names.partition('"')
        names = before + rest.partition('"')[2]
    return max(",;\t|", key=lambda delimiter: (names.count(delimiter), delimiter == ","))


# ---- the column of text ------------------------------------------------------------------------


@dataclass
class _Columns:
    """The columns of the first rows, and which of them hold text."""

    names: list[str] = field(default_factory=list)
    texts: Counter[str] = field(default_factory=Counter)
    nested: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "_Columns":
        columns = cls()
        for row in rows:
            for name, value in row.items():
                name = str(name)
                if name not in columns.names:
                    columns.names.append(name)
                if _as_text(value):
                    columns.texts[name] += 1
                elif value and isinstance(value, list | dict):
                    columns.nested.add(name)
        return columns

    def describe(self) -> str:
        """List the columns for a sentence."""
        printable = ("".join(c for c in name if c.isprintable())[:40] for name in self.names[:20])
        return ", ".join(printable) or "none"


def read_texts(rows: Iterable[Row], options: RowOptions, counts: RowCounts) -> Iterator[str]:
    """Yield the text of each row that has one, with normalised line ends.

    Raises:
        TextError: the column cannot be chosen or is not there; no row has a text; a private key is
            spread over rows.
    """
    iterator = iter(rows)
    first = list(islice(iterator, SAMPLE_ROWS))
    if not first:
        raise TextError("it has no rows")
    columns = _Columns.of(first)
    columns.names += [name for name in options.names if name not in columns.names]
    counts.column = options.column or _choose_column(columns, options)
    is_chat = _holds_chats(first, counts.column)
    counts.is_chat = is_chat
    if is_chat and options.render_chat is None:
        raise TextError(
            f"the column '{counts.column}' holds chats: name a tokenizer with a chat template "
            "(--tokenizer FOLDER or --tokenizer hf:owner/name), or another column after #"
        )
    if not is_chat and not options.column and counts.column.casefold() not in USUAL_COLUMNS:
        counts.nested = tuple(sorted(columns.nested))
    usable = 0
    for row in chain(first, iterator):
        counts.rows += 1
        value = _get(row, counts.column)
        text = _render(value, options, counts) if is_chat else _as_text(value)
        text, bad_characters = replace_surrogates(normalise_line_ends(text))
        if not text.strip():
            counts.skipped += 1
            continue
        if is_first_line_of_key(text):  # the other lines are rows of their own
            raise TextError(HOLDS_PRIVATE_KEY)
        if holds_private_key(text):
            counts.rows_with_keys += 1
            continue
        counts.bad_characters += bad_characters
        usable += 1
        yield text
    if counts.rows_with_keys and not usable:
        raise TextError(HOLDS_PRIVATE_KEY)
    if not usable:
        if counts.column not in columns.names and "." not in counts.column:
            raise TextError(
                f"it has no column '{counts.column}'; its columns are {columns.describe()}"
            )
        if counts.refused_chats:
            raise TextError(counts.chat_problem)
        raise TextError(
            f"none of its {counts.rows:,} rows has a text in the column '{counts.column}'; "
            f"its columns are {columns.describe()}"
        )


def _choose_column(columns: _Columns, options: RowOptions) -> str:
    by_folded = {name.casefold(): name for name in reversed(columns.names)}
    for usual in USUAL_COLUMNS:
        name = by_folded.get(usual)
        if name is not None and columns.texts[name]:
            return name
    for usual in CHAT_COLUMNS:
        if usual in by_folded:
            return by_folded[usual]
    with_text = [name for name in columns.names if columns.texts[name]]
    if len(with_text) == 1:
        return with_text[0]
    for usual in USUAL_COLUMNS:
        if usual in by_folded:
            return by_folded[usual]
    if with_text:
        raise TextError(
            f"its columns are {columns.describe()}: name the one with the text after # "
            f"(…#{with_text[0]})"
        )
    raise TextError(f"no column holds text; its columns are {columns.describe()}")


def _get(row: Row, column: str) -> Any:
    """Return a row's value; "a.b" is the field b of the column a, if no column is called so."""
    if column in row or "." not in column:
        return row.get(column)
    value: Any = row
    for name in column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _as_text(value: Any) -> str:
    """Return a value as text, or "" if it is none; bytes count if they are UTF-8."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode("utf-8-sig")
        except UnicodeDecodeError:
            return ""
    return ""


# ---- chats -------------------------------------------------------------------------------------


def _holds_chats(rows: list[Row], column: str) -> bool:
    """Return whether a column holds lists of messages, also as JSON text."""
    values = [value for row in rows if (value := _get(row, column))]
    return bool(values) and all(_as_messages(value) is not None for value in values[:20])


def _as_messages(value: Any) -> list[dict[str, Any]] | None:
    """Return a chat's messages with "role" and "content", or None if it is not a chat."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list) or not value:
        return None
    messages: list[dict[str, Any]] = []
    for message in value:
        if not isinstance(message, dict):
            return None
        role = message.get("role") or message.get("from")
        content = message.get("content") if "content" in message else message.get("value")
        if not isinstance(role, str) or not isinstance(content, str | list | None):
            return None
        role = {"human": "user", "gpt": "assistant", "bot": "assistant"}.get(role, role)
        messages.append({**message, "role": role, "content": content})
    return messages


def _render(value: Any, options: RowOptions, counts: RowCounts) -> str:
    """Return a chat as text, or "" for what is none or what the template refuses."""
    messages = _as_messages(value)
    if messages is None or options.render_chat is None:
        return ""
    try:
        return options.render_chat(messages)
    except TextError as error:
        counts.refused_chats += 1
        counts.chat_problem = counts.chat_problem or str(error)
        return ""
