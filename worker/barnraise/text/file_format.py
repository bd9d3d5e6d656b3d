"""Recognise the format of a file of text from its content and its name. Pure.

The content decides where it can: by the first bytes of compressed, Parquet and Arrow files, and by
the first lines of JSON. The name decides the rest, in any letter case and without a query
("rows.JSONL?download=true").
"""

import codecs
import re
from urllib.parse import unquote, urlsplit

from barnraise.errors import TextError
from barnraise.text.json_values import JsonReader
from barnraise.text.private_keys import HOLDS_PRIVATE_KEY, head_holds_private_key

TEXT = "text"
JSON_LINES = "jsonl"
JSON = "json"
CSV = "csv"
TSV = "tsv"
PARQUET = "parquet"
ARROW = "arrow"
ZIP = "zip"

HEAD_BYTES = 64 << 10  # of a file that are enough to recognise its format
FORMATS_BY_SUFFIX = {
    **dict.fromkeys((".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org"), TEXT),
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), JSON_LINES),
    ".json": JSON,
    ".csv": CSV,
    **dict.fromkeys((".tsv", ".tab"), TSV),
    **dict.fromkeys((".parquet", ".pq"), PARQUET),
    **dict.fromkeys((".arrow", ".feather"), ARROW),
}
COMPRESSIONS_BY_SUFFIX = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bz2",
    ".xz": "xz",
    ".zip": ZIP,
}
_COMPRESSION_MAGIC = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    *((bytes([kind]) + b"\x2a\x4d\x18", "zstd") for kind in range(0x50, 0x60)),  # frames to skip
    (b"\xfd7zXZ\x00", "xz"),
    (b"PK\x03\x04", ZIP),
    (b"PK\x05\x06", ZIP),
    (b"PK\x07\x08", ZIP),
)
_BZIP2 = re.compile(rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)")
# What a file is whose first bytes are these; none of it is text.
_FOREIGN_MAGIC = (
    (b"%PDF-", "a PDF document"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an office document"),
    (b"{\\rtf", "an office document (RTF)"),
    (b"\x89PNG", "an image"),
    (b"\xff\xd8\xff", "an image"),
    (b"GIF8", "an image"),
    (b"II*\x00", "an image"),
    (b"MM\x00*", "an image"),
    (b"RIFF", "a media file"),
    (b"OggS", "a media file"),
    (b"ID3", "a media file"),
    (b"\x7fELF", "a program"),
    (b"MZ\x90", "a program"),
    (b"\xca\xfe\xba\xbe", "a program"),
    (b"\xcf\xfa\xed\xfe", "a program"),
    (b"SQLite format 3\x00", "a database"),
    (b"7z\xbc\xaf\x27\x1c", "an archive of unknown content (7z)"),
    (b"Rar!\x1a\x07", "an archive of unknown content (RAR)"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"GGUF", "a model"),
    (b"PARE", "an encrypted Parquet file"),
    (b"%!PS", "a PostScript document"),
    (b"SSH PRIVATE KEY FILE FORMAT", "a private key"),
    (b"PuTTY-User-Key-File", "a private key"),
    (
        b"version https://git-lfs.github.com/spec/",
        "a Git LFS pointer instead of the data: run `git lfs pull` first",
    ),
)
# A web page may begin with a declaration of XML and comments.
_WEB_PAGE = re.compile(
    r"(?:<\?xml[^>]*>|<!--(?:(?!-->).)*-->|\s)*(?:<!doctype\s+html|<html[\s>])", re.I | re.S
)
_UNICODE_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16: its mark begins with that of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Control characters that text has: tab, line ends, form feed, backspace, escape.
_TEXT_CONTROLS = bytes((8, 9, 10, 11, 12, 13, 27))
_CONTROLS = bytes(set(range(32)) - set(_TEXT_CONTROLS)) + b"\x7f"
MAX_CONTROL_SHARE = 0.02  # of the bytes of a text
MIN_UNMARKED_CHARACTERS = 32  # by which UTF-16 of other than Latin letters is recognised
_JSON_LINES_TO_TRY = 3
_NEXT_LINE = re.compile(r"[^\S\r\n]*[\r\n]\s*\S")
_OBJECT_START = re.compile(r'\{\s*"[^"\n]{1,100}"\s*:')


def plain_name(name: str) -> str:
    """Return a path or address without its query and fragment, in lower case.

    A download may leave the query in a file's name, so paths are cut in the same way, if a suffix
    is before it: "Who are you?.txt" is the name of a text.
    """
    if "://" in name:
        return unquote(urlsplit(name).path).rstrip("/").casefold()
    before, _, query = name.partition("?")
    has_suffix = "." in before.rpartition("/")[2].lstrip(".")
    is_query = has_suffix or "=" in query or "." not in query
    return (before if is_query else name).rstrip("/").casefold()


def split_suffixes(name: str) -> tuple[str, str, str]:
    """Split a name into (stem, suffix, compression): "A.TXT.GZ?x=1" → ("a", ".txt", "gzip")."""
    base = plain_name(name).rpartition("/")[2]
    stem, dot, suffix = base.rpartition(".")
    compression = COMPRESSIONS_BY_SUFFIX.get(dot + suffix, "") if stem else ""
    if compression:
        base = stem
        stem, dot, suffix = base.rpartition(".")
    if not stem:
        return base, "", compression
    return stem, dot + suffix, compression


def find_compression(head: bytes) -> str:
    """Return how a file is compressed, by its first bytes, or ""."""
    for magic, compression in _COMPRESSION_MAGIC:
        if head.startswith(magic):
            return compression
    return "bz2" if _BZIP2.match(head) else ""


def find_format(name: str, head: bytes) -> str:
    """Return the format of a file by its name and first HEAD_BYTES bytes, decompressed.

    Raises:
        TextError: it is no text; the sentence is what it is instead, without the file's name.
    """
    if not head:
        raise TextError("empty")
    if head.startswith(b"PAR1"):
        return PARQUET
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return ARROW
    if reason := _find_foreign(head):
        raise TextError(reason)
    if find_compression(head):
        raise TextError("an archive inside of another archive or compressed file")
    by_name = FORMATS_BY_SUFFIX.get(split_suffixes(name)[1], TEXT)
    if by_name in (PARQUET, ARROW):
        raise TextError(f"damaged: its content is not {by_name.capitalize()}")
    if _is_binary(head):
        raise TextError("a binary file")
    return _find_json(head, by_name)


def _find_foreign(head: bytes) -> str:
    for magic, description in _FOREIGN_MAGIC:
        if head.startswith(magic):
            return description
    if head[257:262] == b"ustar":
        return "an archive of unknown content (tar)"
    if _WEB_PAGE.match(decode_head(head)):
        return "a web page (HTML)"
    return HOLDS_PRIVATE_KEY if head_holds_private_key(head) else ""


def _is_binary(head: bytes) -> bool:
    """Return whether the bytes have more control characters than text has.

    UTF-16 and UTF-32 have many NULs; they are recognised by their mark or by the NULs' positions.
    """
    if find_marked_unicode(head) or find_unmarked_unicode(head):
        return False
    controls = len(head) - len(head.translate(None, _CONTROLS))
    return controls > max(2, MAX_CONTROL_SHARE * len(head))


def find_marked_unicode(head: bytes) -> str:
    """Return the codec whose byte order mark a file begins with, or ""."""
    return next((codec for mark, codec in _UNICODE_MARKS if head.startswith(mark)), "")


def find_unmarked_unicode(head: bytes) -> str:
    """Return the codec of UTF-16 or UTF-32 without a mark, or "".

    Every second byte of most text in UTF-16 is NUL. Text in other than Latin letters has NULs only
    at spaces and line ends; it is recognised by having nothing but printable characters, which
    other data hardly has.
    """
    pairs = len(head) // 2
    if pairs < 2 or b"\0" not in head:
        return ""
    first = head[: 2 * pairs : 2].count(0) / pairs
    second = head[1 : 2 * pairs : 2].count(0) / pairs
    if second > 0.4 and first < 0.05:
        return "utf-16-le"
    if first > 0.4 and second < 0.05:
        return "utf-16-be"
    codecs_to_try = ("utf-32-le", "utf-32-be") if first + second > 1.0 else ()
    if not codecs_to_try and pairs >= MIN_UNMARKED_CHARACTERS:
        codecs_to_try = ("utf-16-le", "utf-16-be")
    return next((codec for codec in codecs_to_try if _is_printable(head, codec)), "")


def _is_printable(data: bytes, codec: str) -> bool:
    """Return whether bytes are printable characters in a codec, some of them spaces."""
    try:
        text = codecs.getincrementaldecoder(codec)().decode(data)  # the last one may be cut
    except UnicodeDecodeError:
        return False
    printable = "".join(text.split())
    return len(printable) < len(text) and printable.isprintable()


def decode_head(head: bytes) -> str:
    """Decode the first bytes of a file well enough to recognise JSON."""
    codec = find_marked_unicode(head) or find_unmarked_unicode(head) or "utf-8"
    return head.decode(codec, errors="replace")


def _find_json(head: bytes, by_name: str) -> str:
    """Tell JSON lines, a JSON document and what the name states apart."""
    text = decode_head(head).lstrip()
    if by_name == JSON_LINES:
        return JSON if _starts_with_document(text) else JSON_LINES
    if by_name != JSON:
        if re.match(r"\[\s*\{\s*\"", text):
            return JSON
        is_long_line = len(head) >= HEAD_BYTES and "\n" not in text and _OBJECT_START.match(text)
        return JSON_LINES if is_long_line or _count_json_lines(text, len(head)) > 1 else by_name
    return JSON_LINES if _count_json_lines(text, len(head)) > 1 else JSON


def _starts_with_document(text: str) -> bool:
    """Return whether a text begins with a list or an object that is no line before others.

    Lines that are lists each are rows without names; they are refused as such.
    """
    if not text.startswith(("[", "{")):
        return False
    try:
        _, end = JsonReader().raw_decode(text)
    except ValueError:  # damaged, or longer than the first bytes of the file
        return text.startswith("[")
    return "\n" in text[:end] or not _NEXT_LINE.match(text, end)


def _count_json_lines(text: str, head_bytes: int) -> int:
    """Count the objects among the first lines; 0 if one of these lines is anything else.

    A line that begins like an object may be damaged. The last line counts only if it is not cut.
    """
    lines = [line for line in re.split(r"\r\n|\r|\n", text) if line.strip()]
    if head_bytes >= HEAD_BYTES and len(lines) > 1:
        del lines[-1]
    lines = lines[:_JSON_LINES_TO_TRY]
    objects = damaged = 0
    for line in lines:
        try:
            objects += isinstance(JsonReader().decode(line), dict)
        except ValueError:
            damaged += line.startswith("{")
    return objects if objects + damaged == len(lines) else 0
