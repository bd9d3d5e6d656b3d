"""Test that rows of JSON, CSV and tables become texts, or are refused by a sentence."""

import csv
import gzip
import io
import json
import re
import time
from collections.abc import Iterable, Sequence
from functools import partial

import pyarrow
import pytest
from helpers.worker.text_files import CSV, JSONL, LINES, PEM, ROWS, TEXTS, table
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from barnraise.errors import TextError
from barnraise.text import file_format
from barnraise.text.rows import (
    CsvDialect,
    RowCounts,
    RowOptions,
    parse_csv,
    parse_json,
    parse_json_lines,
    read_texts,
)
from barnraise.text.source_file import FileReport, SourceFile, read_file

fields = st.text(st.sampled_from("ab \"\n,;|\t'é{}[]\\"), max_size=12)
documents = st.lists(st.dictionaries(st.sampled_from(["text", "id"]), fields), min_size=1)


@given(st.lists(st.tuples(fields, fields), min_size=1), st.sampled_from(",;\t|"))
def test_quoted_csv_is_read_as_it_was_written(table, delimiter):
    """Quotes, line ends and other delimiters inside of texts change nothing."""
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([("text", "id"), *table])
    dialect, counts = CsvDialect(file_format.CSV, file.getvalue()), RowCounts()
    rows = list(parse_csv(io.StringIO(file.getvalue()), dialect, counts))
    assert [(row["text"], row["id"]) for row in rows] == table
    assert counts == RowCounts(names=["text", "id"]), "nothing is wrong with them"


@given(documents, st.booleans(), st.data())
def test_rows_of_a_cut_file_are_the_whole_ones_before_the_cut(rows, is_list, data):
    """A download that ended early loses its last row, and never yields a part of one."""
    content, ends = "[" if is_list else "", []
    for row in rows:
        content += json.dumps(row)
        ends.append(len(content))
        content += ", " if is_list else "\n"
    content = content.removesuffix(", ") + "]" * is_list
    cut = data.draw(st.integers(0, len(content)))
    whole, counts = [row for row, end in zip(rows, ends, strict=True) if end <= cut], RowCounts()
    read = (
        parse_json(content[:cut], counts)
        if is_list
        else parse_json_lines(io.StringIO(content[:cut]), counts)
    )
    if whole or (not is_list and not cut):
        assert list(read) == whole
        rest = content[ends[len(whole) - 1] : cut] if whole else ""
        is_cut = cut < len(content) if is_list else bool(rest.strip())
        assert bool(counts.cut_line) == is_cut
    else:
        with pytest.raises(TextError, match=r"not JSON|cut off"):
            assert not list(read)
            counts.check_damage()


MANY = [{"id": i, "text": f"Sentence {i} has a few words."} for i in range(100)]
# How a row is written, and what is before, between and after rows.
FORMATS = {
    "a.jsonl": (json.dumps, "", "\n", "\n"),
    "a.jsonl.gz": (json.dumps, "", "\n", "\n"),
    "a.json": (json.dumps, "[", ",", "]"),
    "pretty.json": (partial(json.dumps, indent=1), '{"version": 1, "data": [', ",\n", "]}"),
    "a.csv": ('{id},"{text}"'.format_map, "id,text\n", "\n", "\n"),
    "text first.csv": ("{text};{id}".format_map, "text;id\n", "\n", "\n"),
    "a.tsv": ('{id}\t"{text}"'.format_map, "id\ttext\n", "\n", "\n"),
}
DAMAGE = {
    "cut off": lambda row: row[: 2 * len(row) // 3],
    "other bytes": lambda row: row.replace("few", "\udcff\udc80"),
    "another value": lambda row: "null" if "{" in row else f"{row},x;x\tx",
    "escape": lambda row: row.replace("few", "\\x") if "{" in row else f"{row},x;x\tx",
}


def write_rows(name: str, damage: str, places: Iterable[int]) -> bytes:
    write, before, between, after = FORMATS[name]
    rows = [write(row) for row in MANY]
    for place in places:
        rows[place] = DAMAGE[damage](rows[place])
    content = (before + between.join(rows) + after).encode("utf-8", "surrogateescape")
    return gzip.compress(content) if name.endswith(".gz") else content


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_row_anywhere_is_skipped_counted_and_named(look, name, damage):
    for place in (0, 50, 99):
        found = look(name, write_rows(name, damage, [place]))
        assert (found.refusal, found.documents, found.skipped_rows) == ("", 99, 1), found
        shown = place + ("json" not in name and damage != "other bytes") + 1
        named = (
            rf"skipped: 1 of 100, the first because (row|line) {shown} |the last one, is cut off"
        )
        assert re.search(named, found.warnings[0]), found.warnings
    assert look(name, write_rows(name, damage, range(3, 99, 20))).skipped_rows == 5
    if (name, damage) == ("text first.csv", "cut off"):
        return  # many rows without their last fields may be whole
    refusal = look(name, write_rows(name, damage, range(3, 99, 15))).refusal
    assert "too many rows cannot be read: 7 of 100, the first because" in refusal


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_row_is_read_whatever_its_other_columns_hold(look, name):
    for value in ("9" * 5000, "-" + "9" * 5000, "NaN", "1e999", '1, "id": 2', '{"a": 1, "a": 2}'):
        rows = [json.dumps(row) for row in MANY]
        rows[-1] = rows[-1].replace('"id": 99', f'"id": {value}')
        between, before, after = (",", "[", "]") if name == "a.json" else ("\n", "", "\n")
        found = look(name, before + between.join(rows) + after)
        assert (found.documents, found.warnings, found.refusal) == (100, [], ""), value
    rows[-1] = rows[-1].replace('{"a": 1, "a": 2}', "[" * 3000 + "]" * 3000)
    found = look(name, before + between.join(rows) + after)
    assert found.documents == 99 and "not JSON: nested too deeply" in found.warnings[0]


NUMBERS = [str(i) for i in range(30)]


def join_columns(name: str, header: Sequence[str], columns: Sequence[list[str]]) -> str:
    """Write rows whose columns may share names."""
    rows = list(zip(*columns, strict=True))
    if name.endswith((".csv", ".tsv")):
        delimiter = "," if name.endswith("csv") else "\t"
        return "".join(delimiter.join(row) + "\n" for row in [header, *rows])
    pairs = (zip(map(json.dumps, header), map(json.dumps, row), strict=True) for row in rows)
    objects = ["{" + ", ".join(map(": ".join, row)) + "}" for row in pairs]
    return f"[{','.join(objects)}]" if name == "a.json" else "\n".join(objects)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json"])
def test_columns_that_share_the_name_of_the_text_are_refused(look, name):
    for columns in ((NUMBERS, NUMBERS, TEXTS), (TEXTS, NUMBERS, NUMBERS), (TEXTS, NUMBERS, TEXTS)):
        refusal = look(name, join_columns(name, ["text", "id", "text"], columns)).refusal
        if name.endswith("sv"):
            assert "its columns 1 and 3 are all called 'text': rename all but the one" in refusal
        else:
            assert "30 of 30, the first because row 1 has two columns 'text'" in refusal
    cases = ["Text", "id", "text"]
    both = join_columns(name, cases, (TEXTS, NUMBERS, TEXTS))
    assert "its columns 1 and 3 are all called 'Text'" in look(name, both).refusal
    assert look(name, both, "text").documents == 30
    found = look(name, join_columns(name, cases, (NUMBERS, NUMBERS, TEXTS)))
    assert found.bytes == len("".join(TEXTS)) and not found.warnings
    others = join_columns(name, ["id", "text", "id"], (NUMBERS, TEXTS, NUMBERS))
    assert look(name, others).documents == 30


def test_tables_with_columns_of_one_name_are_refused(look):
    columns = pyarrow.table([NUMBERS, TEXTS], names=["text", "text"])
    parquet.write_table(columns, file := io.BytesIO())
    refusal = look("a.parquet", file.getvalue()).refusal
    assert "its columns 1 and 2 are all called 'text': rename" in refusal


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
def test_table_skips_and_names_rows_that_are_not_utf_8(look, kind):
    texts = [f"This is sentence {number}.".encode() for number in range(200)]
    texts[57] = b"Bytes \xff\xfe"
    size = pyarrow.binary() if kind == pyarrow.string() else pyarrow.large_binary()
    columns = pyarrow.table({"text": pyarrow.array(texts, size).view(kind)})
    parquet.write_table(columns, file := io.BytesIO())
    found = look("a.parquet", file.getvalue())
    assert found.documents == 199
    assert "1 of 200, the first because row 58 holds bytes that are not UTF-8" in found.warnings[0]


def test_chats_of_tables_are_skipped_where_they_are_not_utf_8(tmp_path):
    contents = [f"This is sentence {number}.".encode() for number in range(200)]
    contents[57] = b"Bytes \xff\xfe"
    kind = pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string()})
    raw = pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.binary()})
    messages = [{"role": "user", "content": content} for content in contents]
    chats = pyarrow.array([[message] for message in messages], pyarrow.list_(raw))
    fields = pyarrow.array(messages, raw)
    columns = {"messages": chats.view(pyarrow.list_(kind)), "doc": fields.view(kind)}
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    for column in ("messages", "doc.content"):
        options = RowOptions(column, lambda messages: messages[0]["content"])
        report = FileReport("a.parquet")
        file = SourceFile("a.parquet", partial(path.open, "rb"), str(path))
        assert len(list(read_file(file, report, options))) == 199 and report.skipped_rows == 1
        assert "because row 58 holds bytes that are not UTF-8" in report.warnings[0]


def test_row_that_has_the_column_twice_is_skipped(look):
    rows = [json.dumps(row) for row in MANY * 3]
    for place in (0, 250):
        damaged = [*rows]
        damaged[place] = damaged[place].replace('"id"', '"text": "x", "id"')
        assert (
            f"row {place + 1} has two columns 'text'"
            in look("a.jsonl", "\n".join(damaged)).warnings[0]
        )


def test_wide_and_damaged_documents_take_linear_time(look):
    """Reading 20,000 texts of one object took 22 s, and lists that are not closed as long."""
    wide = json.dumps({f"key{i}": f"Some text {i}. " * 6 for i in range(20_000)})
    rows = [json.dumps({"text": f"Row {i}.", "tags": ["a", "b"]}) for i in range(10_000)]
    rows[::21] = [row.removesuffix("]}") for row in rows[::21]]
    begin = time.process_time()
    assert "its columns are key0, key1" in look("a.json", wide).refusal
    assert look("b.json", f"[{', '.join(rows)}]").skipped_rows == len(rows[::21])
    assert time.process_time() - begin < 5


@given(
    st.lists(st.sampled_from(["some words", "x\r\ny", "", " \n", None, 7, f"a {PEM}b", "\ud800!"]))
)
def test_each_row_is_read_or_counted_and_no_key_is_read(values):
    counts = RowCounts()
    rows = [{"text": "the first"}, *({"text": value} for value in values)]
    read = list(read_texts(rows, RowOptions(), counts))
    assert counts.rows == len(rows) == len(read) + counts.skipped + counts.rows_with_keys
    assert counts.rows_with_keys == sum(value == f"a {PEM}b" for value in values)
    assert counts.bad_characters == sum(text == "\ufffd!" for text in read)
    assert {*read} <= {"the first", "some words", "x\ny", "\ufffd!"}


def test_late_rows_with_private_keys_are_skipped_and_counted(look):
    rows = [*({"text": text} for text in TEXTS * 60), {"text": f"my key: {PEM}abc"}]
    for name, content in (
        ("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows)),
        ("a.parquet", table(text=[row["text"] for row in rows])),
    ):
        found = look(name, content)
        assert not found.refusal and found.files[0].documents == len(rows) - 1, found.refusal
        assert "rows that hold private keys are skipped: 1" in found.warnings[0]


def rows(*values, name: str = "text") -> str:
    return "".join(json.dumps({name: value}) + "\n" for value in values)


def test_rows_without_text_are_skipped_counted_and_warned_of(look):
    found = look("a.jsonl", rows(*TEXTS, None, "", "  ", 3, ["x"]) + '{"other": "y"}\n')
    assert (found.documents, found.skipped_rows) == (30, 6)
    assert "6 of 36 rows (16 %) have no text in the column 'text'" in found.warnings[0]
    few = look("b.jsonl", rows(*(f"{text} Again." for text in TEXTS), None))
    assert few.skipped_rows == 1 and not any("rows" in warning for warning in few.warnings)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (rows(None, None, ""), "none of its 3 rows has a text in the column 'text'"),
        (rows(1, 2, 3, name="number"), "no column holds text; its columns are number"),
        ('{"q": "a b", "a": "c d"}\n' * 3, "its columns are q, a: name the one with the text"),
        ('{"text": "fine row"}\n{"text": \n{"text": "fine row"}\n', "line 2 is not JSON"),
        ("[1]\n[2]\n", "line 1 is not a JSON object"),
        ('{"text": "cut', "line 1, the only one with a row, is cut off"),
        ('{"text": ' + "[" * 100_000, "line 1 is not JSON: nested too deeply"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(look, content, sentence):
    assert sentence in look("a.jsonl", content).refusal


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt", "a"])
def test_rows_whose_first_line_is_long_are_rows(look, name):
    found = look(name, json.dumps({"text": "word " * 20_000}) + "\n" + JSONL)
    assert not found.refusal and found.documents == 31


def test_text_beside_nested_columns_is_warned_of(look):
    rows = [{"title": f"Title {i}", "paragraphs": [{"context": "words"}]} for i in range(30)]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    for found in (
        look("a.json", json.dumps({"version": "1", "data": rows})),
        look("a.parquet", table(**columns)),
    ):
        assert "its text is the column 'title'; other columns hold lists" in found.warnings[0]


def test_column_of_a_plain_text_is_refused(look):
    assert "plain text, which has no column 'body'" in look("a.txt", LINES, "body").refusal


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.jsonl", JSONL + '{"text": "cut o', 31),
        ("a.json", json.dumps(ROWS, indent=1)[:-30], 118),
        ("b.json", json.dumps(ROWS)[:-30], 1),
        ("a.csv", CSV + '30,"an open quote\nand more', 32),
        ("b.csv", CSV + "30", 32),
    ],
)
def test_cut_last_line_is_skipped_and_named(look, name, content, line):
    found = look(name, content)
    assert not found.refusal and found.documents >= 29
    assert f"line {line}, the last one, is cut off" in found.warnings[0]


CSV_ODDITIES = {
    "no names.csv": (
        "".join(f"{text},{i}\n" for i, text in enumerate(TEXTS)),
        "#column1",
        "does not look like names",
    ),
    "one column.csv": (
        "".join(f"A sentence of more than five words, {i}\n".replace(",", "") for i in range(30)),
        "",
        "does not look like names",
    ),
    "empty names.csv": (",id\n" + "".join(f"{text},1\n" for text in TEXTS), "#column1", ""),
    "quotes.csv": ("text,id\n" + "".join(f'"a 2"" {text}\nx",1\n' for text in TEXTS), "", ""),
    "long row.csv": (CSV + "x,y,z\n", "", "line 32 has more fields than there are names"),
    "no line end.csv": (CSV.rstrip("\n"), "", ""),
    "stray quotes.csv": (
        CSV + "31,\n" * 20 + '32,"x\n33 y "z"\n',
        "",
        "line 52 has a quote that is not closed",
    ),
    "open quote.csv": ('id,text\n31,"open\n' + CSV[8:], "", "line 2 opens a quote that is never"),
    "backslashes.csv": (
        "id,title,text\n" + "".join(f'{i},"a \\"b\\", c","{t}\nx"\n' for i, t in enumerate(TEXTS)),
        "",
        "",
    ),
    "paths.csv": ("at,text\n" + "".join(f'"C:\\d\\","{t} ""x"""\n' for t in TEXTS), "", ""),
    "spaces.csv": ("id, text\n" + "".join(f'{i}, "{t}, x"\n' for i, t in enumerate(TEXTS)), "", ""),
    "numbers.csv": ("text,body\n" + "".join(f"{i},{t}\n" for i, t in enumerate(TEXTS)), "", ""),
    "ragged.csv": ("text,note\n" + "\n".join(TEXTS) + "\n", "", ""),
}


@pytest.mark.parametrize("name", CSV_ODDITIES)
def test_odd_csv_is_read_whole_or_with_a_warning(look, name):
    content, column, warning = CSV_ODDITIES[name]
    found = look(name, content, column.removeprefix("#"))
    assert not found.refusal and found.documents == 30
    assert any(warning in each for each in found.warnings) if warning else not found.warnings


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("text\n" + "".join(f"{text}, he said\n" for text in TEXTS), "a delimiter into quotes"),
        (CSV[:95] + '31,"open\n' + CSV[8:300], "line 4 opens a quote that is never closed"),
        (CSV + '31,"open\n32,x "y"\n' * 3, "line 32 has a quote that is not closed at the end"),
        (CSV * 99 + '31,"a \\"b\\", c"\n' * 200, "inside of texts in place of backslashes"),
        ("A long first line of a table without names,and another one\nx,y\n", "column1, column2"),
    ],
    ids=["delimiters in texts", "open quote", "stray quotes", "late backslashes", "no names"],
)
def test_csv_whose_rows_cannot_be_told_apart_is_refused(look, content, sentence):
    assert sentence in look("a.csv", content).refusal


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"title": "x", "body": "some words"}\n' * 2),
        ("a.json", json.dumps([{"title": "x", "body": "some words"}])),
        ("a.csv", "title,body\nx,some words\n"),
        ("a.tsv", "title\tbody\nx\tsome words\n"),
        ("a.parquet", table(title=["x"], body=["some words"])),
        ("a.jsonl.gz", gzip.compress(b'{"title": "x", "body": "some words"}\n')),
        ("nested.jsonl", '{"title": "x", "body": {"en": "some words"}}\n'),
    ],
)
def test_column_can_be_named_for_every_format(look, name, content):
    column = "body.en" if name.startswith("nested") else "body"
    found = look(name, content, column)
    assert found.samples == ["some words"]
    missing = look(name, content, "summary").refusal
    assert "no column 'summary'; its columns are title, body" in missing


def test_usual_column_is_chosen_in_any_letter_case(look):
    assert look("a.jsonl", '{"Title": "x y", "TEXT": "some words"}\n').samples == ["some words"]
    assert look("a.parquet", table(title=["x"], Content=["some words"])).samples == ["some words"]


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array([text.encode() for text in TEXTS]),
        pyarrow.array(TEXTS, pyarrow.large_string()),
        pyarrow.array(TEXTS).dictionary_encode(),
        pyarrow.array([*TEXTS[:-1], None]),
    ],
    ids=["binary", "large", "dictionary", "null"],
)
def test_parquet_columns_of_text_are_read_whatever_their_type(look, column):
    found = look("a.parquet", table(text=column, number=list(range(30))))
    assert found.documents == 30 - column.null_count == 30 - found.skipped_rows


def test_lone_surrogates_are_replaced_and_counted(look):
    found = look("a.jsonl", JSONL * 2 + '{"text": "bad \\ud800 character"}\n')
    assert "lone surrogates) are replaced by U+FFFD: 1" in found.warnings[0]
    short = look("short.json", '[{"text": "a row of nineteen \\ud83d"}]')
    assert not short.refusal and short.samples == ["a row of nineteen \ufffd"]
    assert "lone surrogates" in look("b.jsonl", '{"text": "\\ud800 bad row"}\n' * 9).refusal


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_chats_without_a_template_are_refused_with_what_to_do(look, name):
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    for refused in (
        look("a.jsonl", rows(*[chat] * 9, name=name)),
        look("a.parquet", table(**{name: [chat] * 9})),
    ):
        assert f"'{name}' holds chats: name a tokenizer with a chat template" in refused.refusal
