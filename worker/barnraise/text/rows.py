"""Read the rows of JSON, CSV, Parquet and Arrow files, and choose their column of text.

A row without a usable text is skipped and counted; a file without any is refused, with its columns.
A row that is damaged, in whatever format, is skipped, counted and named; a file with more than
MAX_SKIPPED_SHARE of them is refused.
"""

import csv
import io
import json
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple

from barnraise.errors import TextError
from barnraise.text.encoding import has_undecodable, normalise_line_ends, replace_surrogates
from barnraise.text.file_format import CSV
from barnraise.text.json_values import JsonReader, is_cut_off
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
SAMPLE_CHARACTERS = 64 << 10  # of CSV, by which its dialect is recognised
MAX_SKIPPED_SHARE = 0.05  # of a file's rows: without a text a warning, damaged ones a refusal
MAX_FIELD_CHARACTERS = 256 << 20  # of a field of CSV
MAX_CUT_LINES = 100  # of a text without a closing quote, in CSV of one column; more are others
# A first line of CSV with a longer field, or one of more words, is a row and no line of names.
MAX_NAME_CHARACTERS = 64
MAX_NAME_WORDS = 5
# What can be wrong with the quotes of a row of CSV.
STRAY_QUOTE = (
    "has a quote that is not closed at the end of its field: double the quotes inside of texts"
)
OPEN_QUOTE = "opens a quote that is never closed"
CUT_OFF = "is cut off"
PLAIN_QUOTES = {"quoting": csv.QUOTE_NONE}  # they are ordinary characters
LIST_NAMES = ("data", "rows", "train", "examples")  # usual names of a list of rows
# Objects in a row of a damaged document: a list without its end would reach to the document's.
MAX_INNER_OBJECTS = 500
# Of such a document: what may be before its list, the beginning of an object, what is between two.
_BEFORE_ROWS = re.compile(
    rf'[\s\ufeff]*(?:\{{[^{{}}\[\]]*"(?:{"|".join(LIST_NAMES)})"\s*:\s*(?=\[\s*\{{))?'
)
_OBJECT_START = re.compile(r'\{\s*(?:("[^"\\{}\[\],:\n]*")\s*:|(?=\}))')
BETWEEN_ROWS = " \t\n,[]}\ufeff"
_SEPARATOR_LINE = re.compile(r'"?sep=([^"\n])"?\n', re.I)  # spreadsheets write it


@dataclass
class RowCounts:
    """What reading rows found.

    Attributes:
        column: the column that was read.
        rows: all rows.
        skipped: rows without a usable text.
        bad_characters: characters that UTF-8 cannot hold, replaced by U+FFFD.
        damaged: rows that cannot be read, which are skipped.
        damage: which of them is the first, and what is wrong with it.
        cut_line: the number of a last line that is cut off; 0 if there is none.
        is_chat: whether the column holds chats.
        refused_chats: chats that the template refuses, which are skipped.
        chat_problem: why it refuses the first of them.
        nested: columns of lists or objects next to a column of text that has no usual name.
        has_names: whether the rows came with names of their columns.
        names: of the columns in their order, where a line states them.
        rows_with_keys: rows that hold private keys, which are skipped.
    """

    column: str = ""
    rows: int = 0
    skipped: int = 0
    bad_characters: int = 0
    damaged: int = 0
    damage: str = ""
    cut_line: int = 0
    is_chat: bool = False
    refused_chats: int = 0
    chat_problem: str = ""
    nested: tuple[str, ...] = ()
    has_names: bool = True
    names: list[str] = field(default_factory=list)
    rows_with_keys: int = 0

    def skip_damaged(self, problem: str) -> None:
        """Count a damaged row; `problem` is a sentence that names it."""
        self.damage = self.damage or problem
        self.damaged += 1

    def describe_damage(self) -> str:
        """Say how many rows are damaged, and what is wrong with the first."""
        total = self.rows + self.damaged
        return f"{self.damaged:,} of {total:,}, the first because {self.damage}"

    def check_damage(self) -> None:
        """Refuse a file with too many damaged rows, or with no others. Raises TextError."""
        if self.damaged > MAX_SKIPPED_SHARE * (self.rows + self.damaged):
            raise TextError(f"too many rows cannot be read: {self.describe_damage()}")
        if not self.rows and self.cut_line:
            raise TextError(f"line {self.cut_line:,}, the only one with a row, is cut off")


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
    """Parse one JSON object, or text, a line."""
    reader = JsonReader(_read_object)
    cut_line = 0
    for number, line in enumerate(lines, 1):
        line = line.removeprefix("\ufeff").strip()  # files with marks may have been joined
        if not line:
            continue
        if cut_line:
            counts.skip_damaged(f"line {cut_line:,} is not JSON: it is cut off")
        cut_line = 0
        try:
            value = reader.decode(line)
        except json.JSONDecodeError as error:
            if is_cut_off(line, error):
                cut_line = number
            else:
                counts.skip_damaged(f"line {number:,} is not JSON: {error.msg}")
            continue
        yield from _as_row(value, "line", number, counts)
    counts.cut_line = cut_line


def _as_row(value: Any, noun: str, number: int, counts: RowCounts) -> Iterator[Row]:
    """Yield an object, or a text, as a row; count another value as a damaged row."""
    if isinstance(value, str):
        yield {"text": value}
    elif isinstance(value, dict):
        yield value
    else:
        counts.skip_damaged(f"{noun} {number:,} is not a JSON object with named columns")


def parse_json(text: str, counts: RowCounts) -> Iterator[Row]:
    """Parse a JSON document: a list of objects, one object, or an object that holds such a list.

    Objects that follow each other are rows too.

    Raises:
        TextError: it is not JSON, or holds no objects.
    """
    reader = JsonReader(_read_object)
    try:
        document = reader.decode(text)
    except json.JSONDecodeError as error:
        yield from _parse_damaged(text.rstrip(), counts, reader, error)
        return
    for number, value in enumerate(_find_rows(document), 1):
        yield from _as_row(value, "row", number, counts)


def _find_rows(document: Any) -> list[Any]:
    if isinstance(document, list):
        return document
    if not isinstance(document, dict):
        raise TextError("it holds no objects with named columns")
    lists = {
        name: value
        for name, value in document.items()
        if isinstance(value, list) and any(isinstance(row, dict) for row in value)
    }
    usual = [name for name in LIST_NAMES if name in lists]
    if len(lists) > 1 and not usual:
        raise TextError(f"it holds several lists of rows: {', '.join(sorted(lists)[:20])}")
    return lists[(usual or list(lists))[0]] if lists else [document]


def _parse_damaged(
    text: str, counts: RowCounts, reader: JsonReader, problem: json.JSONDecodeError
) -> Iterator[Row]:
    """Yield the whole objects of a list, or of a sequence, in which others are damaged or cut off.

    After a damaged row, the next one begins with a name that a row before began with: the objects
    inside of it are no rows.
    """
    before = _BEFORE_ROWS.match(text)
    begin = end = before.end() if before else 0
    is_list, is_inside = text.startswith("[", begin), "{" in text[:begin]
    names: set[str] = set()
    error: json.JSONDecodeError | None = None
    number = 0
    matches = list(_OBJECT_START.finditer(text, begin))
    limits = [*(match.start() for match in matches[MAX_INNER_OBJECTS:]), len(text)]
    for index, match in enumerate(matches):
        start, name = match.start(), match[1]
        if start < end or (error and name not in names):
            continue
        between = text[end:start]
        if is_inside and "]" in between:
            break
        number += error is None
        if error or between.strip(BETWEEN_ROWS):
            counts.skip_damaged(f"row {number:,} is not JSON: {(error or problem).msg}")
            number += 1
        if name:  # any text may hold {}
            names.add(name)
        begin = start
        try:
            row, length = reader.raw_decode(text[start : limits[min(index, len(limits) - 1)]])
        except json.JSONDecodeError as caught:
            error, end = caught, start + 1
        else:
            error, end = None, start + length
            yield row
    if not number:
        raise TextError(f"it is not JSON: {problem}")
    rest = text[end:].lstrip(BETWEEN_ROWS)
    is_cut = "]" not in text[end:] if is_list else bool(rest)
    if error:
        is_cut = is_cut_off(text[begin:], error)
    if is_cut:
        counts.cut_line = text.count("\n", 0, begin if error else len(text) - len(rest)) + 1
    elif error or (rest and not is_inside):
        counts.skip_damaged(f"row {number:,} is not JSON: {(error or problem).msg}")


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
    def quoting(self) -> dict[str, Any]:
        """Return how quotes are read, as settings of csv.reader: with the fewest faults.

        In most tab-separated texts they are ordinary characters, because each line is a row: a word
        in quotes at a field's start may be closed in the middle of it, or not at all. In others
        most rows have quotes, and nearly all of these are closed at the end of their fields.
        """
        fields = re.findall(r'(?:^|\t)("[^\t\n]*)', self.sample)
        unclosed = sum(_strip_quotes(value) == value for value in fields)
        is_quoted = 5 * unclosed < len(fields) > self.sample.count("\n") / 2
        choices: list[dict[str, Any]] = [{}]
        if self.kind != CSV and not is_quoted:
            choices.insert(0, PLAIN_QUOTES)
        if '\\"' in self.sample:
            choices.append({"escapechar": "\\"})
        if f'{self.delimiter} "' in self.sample:
            choices.append({"skipinitialspace": True})
        return min(choices, key=self._count_faults)

    @cached_property
    def is_ragged(self) -> bool:
        """Return whether many rows of the sample have fewer fields than the first."""
        rows = self._read_sample(self.quoting)
        short = sum(len(row.values) < len(rows[0].values) for row in rows)
        return short > MAX_SKIPPED_SHARE * len(rows)

    @property
    def is_table(self) -> bool:
        """Return whether all rows of the sample have as many fields as the first: several."""
        rows = self._read_sample(self.quoting)
        return len(rows[0].values) > 1 and not self._count_faults(self.quoting)

    def _count_faults(self, quoting: dict[str, Any]) -> int:
        rows = self._read_sample(quoting)
        return sum(len(row.values) != len(rows[0].values) or row.problem != "" for row in rows)

    def _read_sample(self, quoting: dict[str, Any]) -> list["_CsvRow"]:
        lines = io.StringIO(self.sample, newline="\n")
        rows = list(_read_rows(lines, self, quoting))
        return rows[:-1] if len(self.sample) == SAMPLE_CHARACTERS else rows  # the last may be cut

    def split(
        self, lines: Iterable[str], quoting: dict[str, Any], strict: bool = False
    ) -> Iterator[list[str]]:
        """Yield the fields of each row; `strict` raises csv.Error for a stray or open quote."""
        return csv.reader(lines, delimiter=self.delimiter, strict=strict, **quoting)

    def find_problem(self, values: list[str], lines: list[str], quoting: dict[str, Any]) -> str:
        """Return what is wrong with the quotes of a row: STRAY_QUOTE, OPEN_QUOTE or ""."""
        is_doubtful = len(lines) > 1 or '\\"' in lines[0]
        if not is_doubtful and lines[-1].endswith("\n") and not "".join(values[-1:]).endswith("\n"):
            return ""
        try:
            list(self.split(lines, quoting, strict=True))
        except csv.Error as error:
            if "unexpected end" in str(error):
                return OPEN_QUOTE
            return STRAY_QUOTE if is_doubtful else ""  # a stray one can be read otherwise
        return ""

    def has_rows(self, lines: list[str], quoting: dict[str, Any], width: int) -> bool:
        """Return whether lines after an open quote are rows, and not the rest of a text."""
        if width == 1:
            return len(lines) >= MAX_CUT_LINES
        return 2 * sum(len(row) == width for row in self.split(lines, quoting)) > len(lines)


def choose_dialect(kind: str, sample: str, column: str) -> CsvDialect:
    """Return how a file is read that is called CSV or TSV; one without a tab may be CSV."""
    dialect = CsvDialect(CSV, sample, column)
    is_misnamed = "\t" not in sample and dialect.is_table
    return dialect if kind == CSV or is_misnamed else CsvDialect(kind, sample, column)


class _CsvRow(NamedTuple):
    """A row of CSV: its fields, its lines, the number of the first of these, and its problem."""

    values: list[str]
    lines: list[str]
    number: int
    problem: str


def _read_rows(
    lines: Iterable[str], dialect: CsvDialect, quoting: dict[str, Any]
) -> Iterator[_CsvRow]:
    """Yield the rows of CSV with the lines that each consists of.

    A quote that is not closed merges lines: the first is damaged, and the others are read again.

    Raises:
        TextError: a line cannot be read.
    """
    source = iter(lines)
    again: deque[str] = deque()
    taken: list[str] = []
    width = 0
    number = 1
    if dialect.stated_delimiter:
        next(source, "")
        number = 2

    def next_line() -> str:
        line = again.popleft() if again else next(source, "")
        if line:
            taken.append(line)
        return line

    rows = dialect.split(iter(next_line, ""), quoting)
    try:
        while True:
            values = next(rows, None)
            if values is None:
                return
            row_lines = taken.copy()
            taken.clear()
            width = width or len(values)
            problem = dialect.find_problem(values, row_lines, quoting)
            if problem == OPEN_QUOTE and not dialect.has_rows(row_lines[1:], quoting, width):
                problem = CUT_OFF
            elif problem:
                again.extendleft(reversed(row_lines[1:]))
                del row_lines[1:]
                values = next(dialect.split(row_lines, quoting))
                rows = dialect.split(iter(next_line, ""), quoting)
            if quoting == PLAIN_QUOTES:
                values = [_strip_quotes(value) for value in values]
            if values:  # the line is not blank
                yield _CsvRow(values, row_lines, number, problem)
            number += len(row_lines)
    except csv.Error as error:
        raise TextError(f"line {number} cannot be read: {error}") from None


def _strip_quotes(value: str) -> str:
    """Return a field without the quotes around it, if it is quoted as a whole."""
    inner = value[1:-1]
    if len(value) < 2 or value[0] != '"' or value[-1] != '"' or '"' in inner.replace('""', ""):
        return value
    return inner.replace('""', '"')


def parse_csv(lines: Iterable[str], dialect: CsvDialect, counts: RowCounts) -> Iterator[Row]:
    """Parse comma- or tab-separated values, in lines with their ends.

    The first line has the names of the columns, unless it looks like a row: then they are called
    column1, column2 and so on.

    Raises:
        TextError: a line cannot be read.
    """
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    rows = _read_rows(lines, dialect, dialect.quoting)
    first = next(rows, None)
    if first is None:
        return
    names = [name.strip("\ufeff \t\n") for name in first.values]
    counts.has_names = _looks_like_names(names, dialect.column)
    if not counts.has_names:
        names = [""] * len(names)
    names = counts.names = [name or f"column{n}" for n, name in enumerate(names, 1)]
    for row in rows if counts.has_names else chain([first], rows):
        is_short = len(row.values) < len(names)
        if row.problem == CUT_OFF or (is_short and not row.lines[-1].endswith("\n")):
            counts.cut_line = row.number
        elif fault := _find_fault(row, len(names), dialect):
            counts.skip_damaged(f"line {row.number:,} {fault}")
        else:
            yield dict(zip(names, row.values, strict=False))


def _find_fault(row: _CsvRow, names: int, dialect: CsvDialect) -> str:
    """Return what is wrong with a row; "" if nothing is."""
    if row.problem:
        return row.problem + (" in place of backslashes" if '\\"' in row.lines[0] else "")
    if any(row.values[names:]):
        return "has more fields than there are names: put texts with a delimiter into quotes"
    if len(row.values) < names and not dialect.is_ragged:
        return "has fewer fields than there are names"
    return ""


def _looks_like_names(first: list[str], column: str) -> bool:
    """Return whether a first line of CSV has the names of columns, and is not a row itself."""
    folded = [name.casefold() for name in first]
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


class _RepeatingRow(dict[str, Any]):
    """A row of JSON in which names are repeated; of their values it has the last ones."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated = Counter(name for name, _ in pairs) - Counter(self.keys())


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    return row if len(row) == len(pairs) else _RepeatingRow(pairs)


def _find_delimiter(sample: str) -> str:
    """Return the delimiter that the line of names has most often outside of quotes."""
    names = re.sub('"[^"]*"', "", sample.lstrip("\n")).partition("\n")[0]
    return max(",;\t|", key=lambda delimiter: (names.count(delimiter), delimiter == ","))


# ---- the column of text ------------------------------------------------------------------------


@dataclass
class _Columns:
    """The columns of the first rows, and which of them hold text."""

    names: dict[str, None]
    texts: Counter[str] = field(default_factory=Counter)
    nested: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, rows: Iterable[Row], names: Iterable[str]) -> "_Columns":
        columns = cls(dict.fromkeys(names))
        for row in rows:
            for name, value in row.items():
                name = str(name)
                columns.names[name] = None
                text = _as_text(value)
                if text and not _is_number(text):
                    columns.texts[name] += 1
                elif value and isinstance(value, list | dict):
                    columns.nested.add(name)
        return columns

    def describe(self) -> str:
        """List the columns for a sentence."""
        printable = (
            "".join(c for c in name if c.isprintable())[:40] for name in [*self.names][:20]
        )
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
        counts.check_damage()
        raise TextError("it has no rows")
    columns = _Columns.of(first, options.names)
    counts.column = options.column or _choose_column(columns)
    others = () if options.column else +columns.texts
    refuse_repeated(counts.names or columns.names, counts.column, others)
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
        value = _get(row, counts.column)
        text = _render(value, options, counts) if is_chat else _as_text(value)
        if problem := _find_damage(row, text, counts.column):
            counts.skip_damaged(f"row {counts.rows + counts.damaged + 1:,} {problem}")
            continue
        counts.rows += 1
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
    counts.check_damage()
    if not usable:
        raise TextError(_describe_nothing(columns, counts))


def _describe_nothing(columns: _Columns, counts: RowCounts) -> str:
    """Say why no row has a text."""
    if counts.rows_with_keys:
        return HOLDS_PRIVATE_KEY
    if counts.column not in columns.names and "." not in counts.column:
        return f"it has no column '{counts.column}'; its columns are {columns.describe()}"
    if counts.refused_chats:
        return counts.chat_problem
    return (
        f"none of its {counts.rows:,} rows has a text in the column '{counts.column}'; "
        f"its columns are {columns.describe()}"
    )


def _find_damage(row: Row, text: str, column: str) -> str:
    """Return why a row's text cannot be trusted; "" if it can."""
    if isinstance(row, _RepeatingRow) and column in row.repeated:
        return f"has two columns '{column}'"
    return "holds bytes that are not UTF-8" if has_undecodable(text) else ""


def refuse_repeated(names: Iterable[str], column: str, others: Collection[str] = ()) -> None:
    """Refuse columns that share the name of the column of text, whichever of them has the text.

    Args:
        names: of all columns, in their order.
        column: that of the text.
        others: columns that hold text; they share its name also in other letter cases.

    Raises:
        TextError: with the numbers of these columns.
    """
    places = [
        str(number)
        for number, name in enumerate(names, 1)
        if name == column or (name in others and _fold(name) == _fold(column))
    ]
    if len(places) > 1:
        raise TextError(
            f"its columns {' and '.join(places)} are all called '{column}': rename all but the one "
            "with the text"
        )


def _fold(name: str) -> str:
    return name.strip().casefold()


def _choose_column(columns: _Columns) -> str:
    by_folded = {_fold(name): name for name in reversed(columns.names)}
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
            value = JsonReader().decode(value)
        except ValueError:
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
