"""Every kind of file is read as what it is, or refused with a sentence that names it."""

import bz2
import gzip
import io
import json
import lzma
import random

import pyarrow
import pytest
import zstandard
from helpers.worker.text_files import CSV, JSONL, LINES, PEM, ROWS, TEXTS, archive, inspect, table
from pyarrow import feather

from barnraise.errors import TextError
from barnraise.spec import TextSpec
from barnraise.text import source_file
from barnraise.text.shards import TextPlan

SKIPPED_FRAME = b"\x50\x2a\x4d\x18\4\0\0\0skip"  # with which pzstd begins


def arrow_file(stream: bool) -> bytes:
    file = io.BytesIO()
    content = pyarrow.table({"text": TEXTS})
    if not stream:
        feather.write_feather(content, file)
        return file.getvalue()
    with pyarrow.ipc.new_stream(file, content.schema) as writer:
        writer.write_table(content)
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
    "damaged.txt": ('{"text": "cut\n' + JSONL, "jsonl"),
    "strings.jsonl": ("".join(json.dumps(text) + "\n" for text in TEXTS), "jsonl"),
    "objects.json": ("".join(json.dumps(row, indent=1) + "\n" for row in ROWS), "json"),
    "comma.json": (json.dumps(ROWS)[:-1] + ",]", "json"),
    "objects.jsonl": ("".join(json.dumps(row, indent=1) + "\n" for row in ROWS), "json"),
    "commas.jsonl": (JSONL.replace("}\n", "},\n"), "json"),
    "joined objects.jsonl": (JSONL.replace("}\n", "}"), "json"),
    "nested.jsonl": (json.dumps({"data": ROWS}), "json"),
    "returns.jsonl": (JSONL.replace("\n", "\r"), "jsonl"),
    "lines.csv": (JSONL, "jsonl"),
    "JSON lines.tsv": (JSONL, "jsonl"),
    "list.csv": (json.dumps(ROWS, indent=1), "json"),
    "commas.tsv": (CSV, "tsv"),
    "single.tsv": ("text\n" + "".join(f"{text}\n" for text in TEXTS), "tsv"),
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


NOISE = random.Random(1).randbytes(2000)


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
    assert found.bytes == len(text.encode()) and found.samples[0] == text[:600]
    is_guess = named not in ("utf-8", "utf-16", "utf-32")
    assert any(named in warning for warning in found.warnings) == is_guess


@pytest.mark.parametrize("mark", [b"\xff\xfe", b"\xfe\xff"])
def test_both_byte_orders_are_known_by_their_marks(look, mark):
    codec = "utf-16-le" if mark == b"\xff\xfe" else "utf-16-be"
    assert look("a.txt", mark + GERMAN.encode(codec)).samples[0] == GERMAN[:600]


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
    assert not found.refusal and found.warnings[0].endswith(
        "bytes that are not UTF-8 are replaced by U+FFFD: 3"
    )


@pytest.mark.parametrize("codec", ["utf-8", "utf-16"])
def test_short_text_that_ends_inside_of_a_character_is_read(look, codec):
    found = look("a.txt", "Grüße an alle 😀".encode(codec)[:-2])
    assert not found.refusal and "are replaced by U+FFFD: " in found.warnings[0]


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


# ---- lengths


@pytest.mark.parametrize("text", ["hi", "Too short.\n", "x" * 17])
def test_text_that_is_too_short_is_refused_with_what_is_needed(look, text):
    refusal = look("a.txt", text).refusal
    assert "too short" in refusal and "at least 18" in refusal


def test_text_that_is_too_short_for_a_context_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text(LINES)
    plan = TextPlan(TextSpec(tokenizer="bytes"), context=2000)
    assert "needs at least 4,002" in inspect(tmp_path, plan=plan).refusal


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
    learned = inspect(tmp_path / "a.txt", plan=TextPlan(vocabulary=300))
    assert 0.2 * learned.bytes < learned.tokens < 0.8 * learned.bytes
    assert inspect(tmp_path / "a.txt").tokens == learned.bytes + 1
