"""Every kind of file is read as what it is, or refused with a sentence that names it."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import zipfile

import pyarrow
import pytest
import zstandard
from pyarrow import feather, parquet

from barnraise.errors import TextError
from barnraise.text import source_file
from barnraise.text.inspection import Inspection, InspectionOptions, inspect_source
from barnraise.text.places import parse_place
from barnraise.text.reading import open_source

LINES = "".join(f"Sentence {i} of the text, with some words.\n" for i in range(60))
ROWS = [{"text": f"Row {i} has some words in it.", "id": i} for i in range(30)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)
TEXTS = [row["text"] for row in ROWS]
SKIPPED_FRAME = b"\x50\x2a\x4d\x18\4\0\0\0skip"  # with which pzstd begins
CSV = "id,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(TEXTS))
BYTES = InspectionOptions("bytes")  # learning a BPE would only take longer


def inspect(*places, options: InspectionOptions = BYTES) -> Inspection:
    with open_source([parse_place(str(place)) for place in places]) as source:
        return inspect_source(source, options)


@pytest.fixture
def look(tmp_path):
    """Return a function that inspects one file with this name and content."""

    def look_at(name: str, content: bytes | str, column: str = "") -> Inspection:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return inspect(f"{path}#{column}" if column else path)

    return look_at


def table(**columns) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file, row_group_size=20)
    return file.getvalue()


def arrow_file(stream: bool) -> bytes:
    file = io.BytesIO()
    content = pyarrow.table({"text": TEXTS})
    if not stream:
        feather.write_feather(content, file)
        return file.getvalue()
    with pyarrow.ipc.new_stream(file, content.schema) as writer:
        writer.write_table(content)
    return file.getvalue()


def archive(**files: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as content:
        for name, data in files.items():
            content.writestr(name, data)
    return file.getvalue()


def encrypt(content: bytes) -> bytes:
    """Mark the first file of an archive as one that needs a password."""
    place = content.find(b"PK\x01\x02") + 8
    return content[:place] + bytes([content[place] | 1]) + content[place + 1 :]


# ---- formats

FORMATS = {
    "a.txt": (LINES, "text"),
    "A.TXT": (LINES, "text"),
    "a.md": (LINES, "text"),
    "noextension": (LINES, "text"),
    "a.txt.gz": (gzip.compress(LINES.encode()), "text"),
    "A.TXT.GZ": (gzip.compress(LINES.encode()), "text"),
    "a.gz?X=1&Y=2": (gzip.compress(LINES.encode()), "text"),
    "twice.gz": (gzip.compress(LINES[:900].encode()) + gzip.compress(LINES[900:].encode()), "text"),
    "misnamed.txt": (gzip.compress(LINES.encode()), "text"),
    "a.txt.zst": (zstandard.compress(LINES.encode()), "text"),
    "a.txt.bz2": (bz2.compress(LINES.encode()), "text"),
    "a.txt.xz": (lzma.compress(LINES.encode()), "text"),
    "plain.txt.gz": (LINES, "text"),
    "rows.jsonl": (JSONL, "jsonl"),
    "ROWS.JSONL": (JSONL, "jsonl"),
    "rows.jsonl?download=true": (JSONL, "jsonl"),
    "rows.ndjson": (JSONL, "jsonl"),
    "rows.txt": (JSONL, "jsonl"),
    "rows": (JSONL, "jsonl"),
    "lines.json": (JSONL, "jsonl"),
    "rows.jsonl.gz": (gzip.compress(JSONL.encode()), "jsonl"),
    "rows.jsonl.zst": (zstandard.compress(JSONL.encode()), "jsonl"),
    "crlf.jsonl": (JSONL.replace("\n", "\r\n"), "jsonl"),
    "bom.jsonl": (b"\xef\xbb\xbf" + JSONL.encode(), "jsonl"),
    "wide.jsonl": (JSONL.encode("utf-16"), "jsonl"),
    "list.json": (json.dumps(ROWS), "json"),
    "pretty.json": (json.dumps(ROWS, indent=2), "json"),
    "nested.json": (json.dumps({"version": 1, "data": ROWS}), "json"),
    "strings.json": (json.dumps(TEXTS), "json"),
    "list.jsonl": (json.dumps(ROWS), "json"),
    "a.csv": ("id,text\n" + "".join(f'{i},"{t}"\n' for i, t in enumerate(TEXTS)), "csv"),
    "semicolons.csv": ("id;text\n" + "".join(f"{i};{t}\n" for i, t in enumerate(TEXTS)), "csv"),
    "wide.csv": (("text,id\n" + "".join(f"{t},1\n" for t in TEXTS)).encode("utf-16"), "csv"),
    "a.tsv": ("id\ttext\n" + "".join(f"{i}\t{t}\n" for i, t in enumerate(TEXTS)), "tsv"),
    "a.parquet": (table(text=TEXTS), "parquet"),
    "A.PARQUET": (table(text=TEXTS), "parquet"),
    "a.parquet.gz": (gzip.compress(table(text=TEXTS)), "parquet"),
    "misnamed.jsonl": (table(text=TEXTS), "parquet"),
    "a.arrow": (arrow_file(stream=False), "arrow"),
    "stream.arrow": (arrow_file(stream=True), "arrow"),
    "a.zip": (archive(**{"in/a.txt": LINES.encode(), ".env": b"KEY=1"}), "text"),
    "Who are you?.txt": (LINES, "text"),
    "to skip.zst": (SKIPPED_FRAME + zstandard.compress(LINES.encode()), "text"),
    "joined.jsonl": ("".join("\ufeff" + json.dumps(row) + "\n" for row in ROWS), "jsonl"),
    "strings.jsonl": ("".join(json.dumps(text) + "\n" for text in TEXTS), "jsonl"),
    "objects.json": ("".join(json.dumps(row, indent=1) + "\n" for row in ROWS), "json"),
    "comma.json": (json.dumps(ROWS)[:-1] + ",]", "json"),
    "stated.csv": ("sep=;\nid;text\n" + "".join(f"1;{t}\n" for t in TEXTS), "csv"),
    "blank lines.csv": ("\n" + CSV.replace("\n", "\n\n"), "csv"),
    "stray.tsv": ("id\ttext\n" + "".join(f'"{i}\t{t}\n' for i, t in enumerate(TEXTS)), "tsv"),
    "lines.tsv": ("id\ttext\n" + "".join(f'"a\nb"\t"{t}"\n' for t in TEXTS), "tsv"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_format_is_found_from_content_and_name(look, name):
    content, kind = FORMATS[name]
    found = look(name, content)
    assert not found.refusal and [file.format for file in found.files] == [kind]
    assert found.documents == (1 if kind == "text" else len(ROWS))
    expected = LINES if kind == "text" else "".join(TEXTS)
    assert found.bytes == len(expected) == found.characters


PEM = "-----BEGIN PRIVATE KEY-----\n"
NO_TEXT = {
    "empty.txt": (b"", "empty"),
    "blank.txt": (b" \n\n\t \n", "white space"),
    "page.jsonl": ("<!doctype HTML><html>", "a web page"),
    "marked.txt": (b"\xef\xbb\xbf<!doctype html>" + b"words " * 9, "a web page"),
    "wide.txt": ("<html><p>words".encode("utf-16"), "a web page"),
    "declared.txt": ('<?xml version="1.0"?>\n<!-- x -->\n<!DOCTYPE html>', "a web page"),
    "print.txt": ("%!PS-Adobe-3.0\n" + "words " * 9, "a PostScript document"),
    "pointer.parquet": ("version https://git-lfs.github.com/spec/v1\noid x", "Git LFS pointer"),
    "a.txt": ("%PDF-1.4 text", "a PDF document"),
    "word.txt": (archive(**{"[Content_Types].xml": b"<x/>"}), "office document"),
    "old.txt": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(100), "office document"),
    "image.txt": (b"\x89PNG\r\n\x1a\n" + bytes(100), "an image"),
    "program": (b"\x7fELF" + bytes(100), "a program"),
    "key.txt": ("a\n-----BEGIN OPENSSH PRIVATE KEY-----\nabc", "a private key"),
    "wide key.txt": ("-----BEGIN RSA PRIVATE KEY-----\nabc".encode("utf-16"), "a private key"),
    "old key.txt": ("---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\nabc", "a private key"),
    "age.txt": ("AGE-SECRET-KEY-1" + "Q" * 58, "a private key"),
    "late key.txt": (LINES * 3000 + PEM, "a private key"),
    "late key.txt.gz": (gzip.compress(f"{LINES * 3000}{PEM}abc".encode()), "a private key"),
    "late wide key.txt": ((LINES * 3000 + PEM).encode("utf-16"), "a private key"),
    "lines.jsonl": (
        "\n".join(json.dumps(x) for x in (*TEXTS, PEM.strip(), "MII")),
        "a private key",
    ),
    "late.csv": (CSV * 99 + f"1,{PEM}MII,", "a private key"),
    "keys.jsonl": ("\n".join([json.dumps({"text": PEM + "a"})] * 2), "a private key"),
    "unfinished.txt": (LINES.encode() * 30 + bytes(100_000), "are NUL"),
    "passwords.txt": (LINES, "rename it if it holds none"),
    "noise.txt": (bytes(range(256)) * 30, "a binary file"),
    "a.parquet": ("not parquet at all", "not Parquet"),
    "tar.txt": (bytes(257) + b"ustar" + bytes(300), "tar"),
    "images.zip": (archive(**{"a.png": b"x", "b.jpg": b"y"}), "archive of unknown content"),
    "locked.zip": (encrypt(archive(**{"a.txt": LINES.encode()})), "a.txt (encrypted)"),
    "languages.zip": (archive(**{"en.txt": b"x" * 99, "de.txt": b"y" * 99}), "languages de, en"),
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_file_without_text_is_refused_by_name(look, name):
    content, reason = NO_TEXT[name]
    refusal = ""
    try:
        refusal = look(name, content).refusal
    except TextError as error:
        refusal = str(error)
    assert reason in refusal and name in refusal, refusal


def test_late_rows_with_private_keys_are_skipped_and_counted(look):
    rows = [*({"text": text} for text in TEXTS * 60), {"text": f"my key: {PEM}abc"}]
    for name, content in (
        ("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows)),
        ("a.parquet", table(text=[row["text"] for row in rows])),
    ):
        found = look(name, content)
        assert not found.refusal and found.files[0].documents == len(rows) - 1, found.refusal
        assert "rows that hold private keys are skipped: 1" in found.warnings[0]


NOISE = random.Random(1).randbytes(2000)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a.ipynb", ".ipynb is not a text format; it is read as"),
        ("a.xml", ".xml is not a text format"),
        (".a.txt", "hidden"),
        ("config.json", "configuration"),
        ("a.txt.bak", "a temporary file"),
        ("noextension", ""),
    ],
)
def test_named_file_that_a_folder_would_leave_out_is_warned_of(look, name, reason):
    found = look(name, LINES if name != "config.json" else JSONL)
    assert not found.refusal and len(found.warnings) == (1 if reason else 0)
    assert not reason or reason in found.warnings[0]


DAMAGED = {
    "a.txt.gz": gzip.compress(LINES.encode())[:-30],
    "crc.txt.gz": gzip.compress(LINES.encode())[:-6] + b"123456",
    "noise.gz": b"\x1f\x8b" + NOISE,
    "a.txt.bz2": bz2.compress(LINES.encode())[:-30],
    "a.txt.xz": lzma.compress(LINES.encode())[:-30],
    "a.txt.zst": zstandard.compress(LINES.encode())[:-30],
    "noise.zst": b"\x28\xb5\x2f\xfd" + NOISE,
    "a.zip": archive(**{"a.txt": LINES.encode()})[:-30],
    "half.parquet": table(text=TEXTS)[:700],
    "footer.parquet": b"PAR1" + b"x" * 100 + b"PAR1",
    "noise.arrow": b"ARROW1\0\0" + NOISE,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_file_is_one_sentence_with_its_name(look, name):
    try:
        refusal = look(name, DAMAGED[name]).refusal
    except TextError as error:
        refusal = str(error)
    assert name in refusal and "\n" not in refusal, refusal
    assert any(word in refusal for word in ("damaged", "cannot be read")), refusal


# ---- encodings

GERMAN = "Grüße aus München, schöne Straße über die Brücke.\n" * 20
FRENCH = "Ça va très bien, merci. L'été à la plage où il fait chaud.\n" * 20
RUSSIAN = "Привет, мир. Это обычный текст на русском языке.\n" * 20
POLISH = "Zażółć gęślą jaźń. Dzień dobry, jak się dziś masz?\n" * 20
TURKISH = "Pijamalı hasta yağız şoföre çabucak güvendi.\n" * 20
JAPANESE = "これは日本語のテキストです。今日は天気がいい。\n" * 20
CHINESE = "这是一个中文文本。今天天气很好。\n" * 20
ENCODINGS = [
    (GERMAN, "utf-8", "utf-8"),
    (GERMAN, "utf-8-sig", "utf-8"),
    (GERMAN, "utf-16", "utf-16"),
    (GERMAN, "utf-32", "utf-32"),
    (LINES, "utf-16-le", "utf-16-le"),
    (LINES, "utf-16-be", "utf-16-be"),
    (GERMAN, "latin-1", "cp1252"),
    (FRENCH, "cp1252", "cp1252"),
    ("It’s a “quoted” text – with dashes.\n" * 20, "cp1252", "cp1252"),
    (POLISH, "cp1250", "cp1250"),
    (TURKISH, "cp1254", "cp1254"),
    (RUSSIAN, "cp1251", "cp1251"),
    (RUSSIAN, "koi8-r", "koi8-r"),
    (JAPANESE, "shift_jis", "cp932"),
    (JAPANESE, "euc_jp", "euc_jp"),
    (JAPANESE, "iso2022_jp", "iso2022_jp"),
    (CHINESE, "utf-16-le", "utf-16-le"),
    (RUSSIAN, "utf-16-be", "utf-16-be"),
    (LINES, "utf-32-le", "utf-32-le"),
    (LINES * 30 + "one café, naïve\n", "latin-1", "cp1252"),
    (LINES * 500 + GERMAN * 30, "cp1252", "cp1252"),
    (CHINESE, "gbk", "gb18030"),
]


@pytest.mark.parametrize(("text", "codec", "named"), ENCODINGS)
def test_encoding_is_found_and_named(look, text, codec, named):
    found = look("a.txt", text.encode(codec))
    assert not found.refusal and found.files[0].encoding == named
    assert found.bytes == len(text.encode()) and found.samples[0] == text[:300]
    is_guess = named not in ("utf-8", "utf-16", "utf-32")
    assert any(named in warning for warning in found.warnings) == is_guess


@pytest.mark.parametrize("mark", [b"\xff\xfe", b"\xfe\xff"])
def test_both_byte_orders_are_known_by_their_marks(look, mark):
    codec = "utf-16-le" if mark == b"\xff\xfe" else "utf-16-be"
    assert look("a.txt", mark + GERMAN.encode(codec)).samples[0] == GERMAN[:300]


UNDECODABLE = {
    "noise": random.Random(2).randbytes(3000).translate(bytes(range(128, 256)) * 2),
    "noise in text": (LINES[:3000].encode() + NOISE[:40].translate(bytes(range(128, 256)) * 2)) * 3,
    "damaged UTF-8": GERMAN.encode() + b"\xff\xfe" * 20,
    "marks in text": LINES.encode() + b"\xfe\xff" * 20,
    "cut characters": "Grüße ü".encode()[:-1] * 60,
}


@pytest.mark.parametrize("kind", UNDECODABLE)
def test_more_than_a_thousandth_undecodable_is_refused(look, kind):
    refusal = look("a.txt", UNDECODABLE[kind]).refusal
    assert "% of its bytes are not UTF-8" in refusal and "convert it" in refusal


def test_encoding_that_changes_late_does_not_break_a_line_end(look):
    """A CR may end the part that was read as ASCII, with its LF in the next part."""
    part = ("a" * 63 + "\n") * 16383 + "a" * 63  # one byte less than is read at once
    found = look("a.txt", (part + "\r\n" + GERMAN).encode("cp1252"))
    assert found.files[0].encoding == "cp1252"
    assert found.characters == len(part) + 1 + len(GERMAN)


def test_few_undecodable_bytes_are_replaced_and_counted(look):
    found = look("a.txt", (LINES * 3).encode() + b"\xff\xfe\xfd")
    assert not found.refusal and "3 bytes that are not UTF-8" in found.warnings[0]


def test_texts_that_differ_in_line_ends_or_mark_are_copies(tmp_path):
    for name, text in {
        "a": LINES.encode(),
        "b": LINES.replace("\n", "\r\n").encode(),
        "c": LINES.replace("\n", "\r").encode(),
        "d": LINES.encode("utf-8-sig"),
        "e": LINES.encode("utf-16"),
    }.items():
        (tmp_path / f"{name}.txt").write_bytes(text)
    found = inspect(tmp_path)
    assert (found.documents, found.duplicates, found.bytes) == (1, 4, len(LINES))


# ---- rows


def rows(*values, name: str = "text") -> str:
    return "".join(json.dumps({name: value}) + "\n" for value in values)


def test_rows_without_text_are_skipped_counted_and_warned_of(look):
    found = look("a.jsonl", rows(*TEXTS, None, "", "  ", 3, ["x"]) + '{"other": "y"}\n')
    assert (found.documents, found.skipped_rows) == (30, 6)
    assert "6 of 36 rows (17%) have no text in the column 'text'" in found.warnings[0]
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
        ('{"text": "cut', "line 1 is not JSON"),
        ('{"text": ' + "[" * 100_000, "line 1 is not JSON"),
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
    "same names.csv": ("text,text\n" + "".join(f"{text},copy\n" for text in TEXTS), "", ""),
    "empty names.csv": (",id\n" + "".join(f"{text},1\n" for text in TEXTS), "#column1", ""),
    "quotes.csv": ("text,id\n" + "".join(f'"a 2"" {text}\nx",1\n' for text in TEXTS), "", ""),
    "long row.csv": (CSV + "x,y,z\n", "", "1 rows have more fields than there are names"),
    "no line end.csv": (CSV.rstrip("\n"), "", ""),
    "stray quotes.csv": (
        CSV + "31,\n" * 20 + '32,"x\n33,y "z"\n',
        "",
        "a quote in line 52 is not closed",
    ),
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
        (CSV + '31,"open\n' + CSV * 4, "line 32 opens a quote that is never closed"),
        (CSV + '31,"open\n' + CSV + '32,"open\n', "a quote in line 32 is not closed at the end"),
        ("A long first line of a table without names,and another one\nx,y\n", "column1, column2"),
    ],
    ids=["delimiters in texts", "open quote", "stray quotes", "no names"],
)
def test_csv_whose_rows_cannot_be_told_apart_is_refused(look, content, sentence):
    assert sentence in look("a.csv", content).refusal


def test_archive_is_read_as_a_folder_is(look):
    names = [
        "train.txt",
        "test.txt",
        "a\\.env",
        "m/node_modules/x.txt",
        "../../b.txt",
        "a/train.txt",
    ]
    found = look("a.zip", archive(**{name: (LINES + name).encode() for name in names}))
    assert [file.path.partition(".zip/")[2] for file in found.files] == ["a/train.txt", "train.txt"]
    reasons = {item.path.partition(".zip/")[2]: item.reason for item in found.left_out}
    assert reasons == {
        "test.txt": "the split 'test'",
        "a/.env": "may hold passwords or keys",
        "m/node_modules/x.txt": "packages of a program",
        "../../b.txt": "a path out of its archive",
    }


def test_archive_inside_of_an_archive_is_left_out(look):
    inner = archive(**{"in.txt": LINES.encode()})
    found = look("a.zip", archive(**{"b.zip": inner, "c.txt": LINES.encode(), "d.zip": inner[:4]}))
    assert found.documents == 1 and len(found.files) == 1
    assert [item.reason for item in found.left_out] == [
        "an archive inside of another archive or compressed file"
    ] * 2


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
    assert "1 characters that no encoding can hold" in found.warnings[0]
    assert "lone surrogates" in look("b.jsonl", '{"text": "\\ud800 bad row"}\n' * 9).refusal


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_chats_without_a_template_are_refused_with_what_to_do(look, name):
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    for refused in (
        look("a.jsonl", rows(*[chat] * 9, name=name)),
        look("a.parquet", table(**{name: [chat] * 9})),
    ):
        assert f"'{name}' holds chats: name a tokenizer with a chat template" in refused.refusal


# ---- folders


@pytest.fixture
def folder(tmp_path):
    """Fill a folder with files to read and files to leave out."""
    root = tmp_path / "corpus"
    for name, content in {
        "a.txt": LINES,
        "b/rows.jsonl": JSONL,
        "LICENSE.txt": LINES + "licence",
        ".env": "SECRET=1",
        ".git/config.txt": "x",
        "node_modules/m/readme.txt": "x",
        "env/pyvenv.cfg": "",
        "env/notes.txt": "x",
        "report.docx": "PK",
        "damaged.txt.gz": gzip.compress(LINES.encode() * 9)[:150],
        "page.txt": "<html>",
        "empty.txt": "",
        "script.py": "print()",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def test_folder_is_read_by_the_allow_list_and_the_rest_is_listed(folder):
    found = inspect(folder)
    assert [file.path for file in found.files] == [f"{folder}/a.txt", f"{folder}/b/rows.jsonl"]
    left_out = {item.path.removeprefix(f"{folder}/"): item.reason for item in found.left_out}
    assert set(left_out) == {
        *("LICENSE.txt", ".env", ".git/", "node_modules/", "env/", "report.docx"),
        *("damaged.txt.gz", "page.txt", "empty.txt", "script.py"),
    }
    assert all(left_out.values()) and "damaged" in left_out["damaged.txt.gz"]
    assert not found.refusal and "2 files of text formats cannot be used" in found.warnings[0]
    report = found.to_json()
    assert list(report) == ["files", "skipped", "documents", "bytes", "duplicates", "warnings"]
    assert report["documents"] == 31 and report["bytes"] == len(LINES) + sum(map(len, TEXTS))


@pytest.mark.parametrize("name", ["node_modules", "env", ".git", "secrets"])
def test_named_folder_that_is_private_or_no_text_is_refused(folder, name):
    """A pattern of the shell names each folder itself."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "a.txt").write_text(LINES)
    with pytest.raises(TextError, match=f"{name} is not read"):
        inspect(folder / "a.txt", folder / name)
    hidden = folder / ".corpus"
    hidden.mkdir()
    (hidden / "a.txt").write_text(LINES)
    assert inspect(hidden).documents == 1


def test_links_and_special_files_are_left_out(folder):
    (folder.parent / "outside.txt").write_text(LINES + "outside")
    (folder / "link.txt").symlink_to(folder.parent / "outside.txt")
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe.txt")
    reasons = {item.path.rpartition("/")[2]: item.reason for item in inspect(folder).left_out}
    assert reasons["link.txt"] == "a link" and "pipe" in reasons["pipe.txt"]
    assert "a link to another folder" in {item.reason for item in inspect(folder).left_out}
    with pytest.raises(TextError, match="not a file"):
        inspect(folder / "pipe.txt")


def test_folder_without_text_says_what_it_left_out(tmp_path):
    (tmp_path / "README.md").write_text(LINES)
    assert "README.md (about the data" in inspect(tmp_path).refusal
    assert "the folder has no files" in inspect_empty(tmp_path / "nothing")


def inspect_empty(path) -> str:
    path.mkdir()
    return inspect(path).refusal


def test_licence_beside_a_table_is_not_the_text(tmp_path):
    (tmp_path / "LICENSE.txt").write_text(LINES * 9)
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "a.parquet").write_bytes(table(text=TEXTS))
    assert [file.format for file in inspect(tmp_path).files] == ["parquet"]
    named = inspect(tmp_path / "LICENSE.txt")
    assert not named.refusal and "not like a text" in named.warnings[0]


def test_dataset_folder_with_configurations_needs_a_choice(tmp_path):
    card = "---\nconfigs:\n- config_name: small\n  data_files: small/*.jsonl\n"
    second = "- config_name: large\n  data_files: large/*.jsonl\n"
    for name in ("small", "large", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text(JSONL.replace("Row", name))
    (tmp_path / "README.md").write_text(f"{card}---\n")
    assert [file.path for file in inspect(tmp_path).files] == [f"{tmp_path}/small/rows.jsonl"]
    (tmp_path / "README.md").write_text(f"{card}{second}---\n")
    with pytest.raises(TextError, match=r"several configurations.*small, large"):
        inspect(tmp_path)


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        ("---\nconfigs: [\n---\n", "cannot be used"),
        ("---\nconfigs:\n- config_name: a\n  data_files: no/*.jsonl\n---\n", "cannot be used"),
        ("# Notes\nconfigs: none\n---\n", ""),
    ],
    ids=["damaged", "nothing there", "no card"],
)
def test_card_that_cannot_be_used_is_a_sentence(tmp_path, card, reason):
    (tmp_path / "a.jsonl").write_text(JSONL)
    (tmp_path / "README.md").write_text(card)
    if not reason:
        assert inspect(tmp_path).documents == 30
        return
    with pytest.raises(TextError, match=reason):
        inspect(tmp_path)


def test_several_languages_in_a_folder_are_refused_with_the_choices(tmp_path):
    for name in ("en", "de"):
        (tmp_path / f"{name}.txt").write_text(LINES + name)
    with pytest.raises(TextError, match=r"mixes the languages de, en.*de\.txt, en\.txt"):
        inspect(tmp_path)
    assert inspect(tmp_path / "en.txt", tmp_path / "de.txt").documents == 2, "named one by one"


# ---- lengths


@pytest.mark.parametrize("text", ["hi", "Too short.\n", "x" * 17])
def test_text_that_is_too_short_is_refused_with_what_is_needed(look, text):
    refusal = look("a.txt", text).refusal
    assert "too short" in refusal and "at least 18" in refusal


def test_text_that_is_too_short_for_a_context_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text(LINES)
    options = InspectionOptions("bytes", context=2000)
    assert "needs at least 4,002" in inspect(tmp_path, options=options).refusal


@pytest.mark.parametrize("ending", ["\r", " ", "\n"])
def test_one_huge_line_is_cut_into_documents(look, ending):
    found = look("a.txt", LINES.replace("\n", ending) * 100)
    assert not found.refusal and found.documents >= 3


def test_small_compressed_file_of_one_endless_line_is_refused(look, monkeypatch):
    """A file of a few kilobytes may stand for gigabytes, which must not lie in memory."""
    monkeypatch.setattr(source_file, "MAX_LINE_CHARACTERS", 1 << 20)
    bomb = gzip.compress(JSONL.encode() + b'{"text": "' + bytes([97]) * (8 << 20))
    assert len(bomb) < 20_000
    assert "it has a line of more than 1 MB" in look("rows.jsonl.gz", bomb).refusal


def test_tokens_are_estimated_by_a_sample(look, tmp_path):
    look("a.txt", LINES * 20)
    learned = inspect(tmp_path / "a.txt", options=InspectionOptions("bpe", 300))
    assert 0.2 * learned.bytes < learned.tokens < 0.8 * learned.bytes
    assert inspect(tmp_path / "a.txt").tokens == learned.bytes + 1
