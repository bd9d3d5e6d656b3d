"""Decode the bytes of a file of text: find its encoding, count what cannot be decoded.

UTF-8 with or without a byte order mark, and UTF-16 and UTF-32 by their marks, need no guess. Any
other encoding is detected by charset-normalizer and named in a warning. A text of ASCII decides at
its first other byte, wherever that is. Line ends become LF.
"""

import codecs
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass

from barnraise.errors import TextError
from barnraise.formats import format_share
from barnraise.text.decompression import Peekable
from barnraise.text.extra import needs_extra
from barnraise.text.file_format import (
    HEAD_BYTES,
    MAX_CONTROL_SHARE,
    find_marked_unicode,
    find_unmarked_unicode,
)
from barnraise.text.letters import LETTERS_BY_CODEC, choose_codec

MAX_BAD_SHARE = 0.001  # of a file's bytes that may be undecodable
FEW_BAD = 2  # that may be so in a file of any size: a cut through a character leaves them
SAMPLE_BYTES = 1 << 20  # from which the encoding is detected
READ_BYTES = 1 << 20
_GUESS_BYTES = 64 << 10  # around the first undecodable byte; a longer sample only takes longer
_SURROGATES = re.compile("[\ud800-\udfff]")
_UNDECODABLE = re.compile("[\udc80-\udcff]")  # what stands for a byte that could not be decoded
_JAPANESE_ESCAPE = re.compile(rb"\x1b\$[@B]")  # switches to Japanese in ISO-2022-JP, which is ASCII
_BEYOND_ASCII = re.compile("[^\x00-\x7f]")
REPLACEMENT = "\ufffd"


@dataclass
class DecodingCounts:
    """What decoding a file found.

    Attributes:
        encoding: the codec's name.
        is_guess: whether the encoding was detected, not stated.
        read_bytes: the bytes read.
        bad_bytes: those that could not be decoded; each run of them became U+FFFD.
        characters: that were decoded.
        nuls: NUL characters among them.
        is_rows: whether the rows count undecodable bytes of UTF-8, which become lone surrogates.
    """

    encoding: str = "utf-8"
    is_guess: bool = False
    read_bytes: int = 0
    bad_bytes: int = 0
    characters: int = 0
    nuls: int = 0
    is_rows: bool = False

    def check(self) -> None:
        """Refuse a file with too many undecodable bytes, or with more NULs than text has.

        Raises:
            TextError: with the share, without the file's name.
        """
        if has_too_many(self.bad_bytes, self.read_bytes):
            share = format_share(self.bad_bytes / self.read_bytes)
            raise TextError(
                f"{share} of its bytes are not {self.encoding.upper()}, nor is it in another "
                "known encoding: convert it to UTF-8"
            )
        if self.nuls > max(2, MAX_CONTROL_SHARE * self.characters):
            share = format_share(self.nuls / self.characters)
            raise TextError(
                f"{share} of its characters are NUL: it is binary, or was not written to its end"
            )


def find_encoding(sample: bytes) -> tuple[str, bool]:
    """Return a file's codec by its first bytes, and whether it is a guess.

    Raises:
        TextError: it is not UTF-8, and no other encoding can be looked for.
    """
    if marked := find_marked_unicode(sample):
        return marked, False
    if unmarked := find_unmarked_unicode(sample[:HEAD_BYTES]):
        return unmarked, True
    if _JAPANESE_ESCAPE.search(sample) and sample.isascii():
        return "iso2022_jp", True
    return _find_byte_encoding(sample)


def _find_byte_encoding(sample: bytes) -> tuple[str, bool]:
    """Return the codec of a text in UTF-8 or an older encoding, and whether it is a guess."""
    text = sample.decode("utf-8", errors="surrogateescape")
    bad = [match.start() for match in _SURROGATES.finditer(text)]
    if len(bad) <= 3 and all(position >= len(text) - 3 for position in bad):
        return "utf-8", False  # a character may be cut at the sample's end
    others = sum(1 for _ in _BEYOND_ASCII.finditer(text)) - len(bad)
    is_few = len(bad) <= MAX_BAD_SHARE * len(sample)
    if others >= len(bad) or (is_few and others):
        return "utf-8", False  # it is UTF-8 that is damaged
    first = len(text[: bad[0]].encode("utf-8", errors="surrogateescape"))
    begin = max(0, first - _GUESS_BYTES // 2)
    codec = _guess(sample[begin : begin + _GUESS_BYTES], is_required=not is_few)
    return (codec, True) if codec else ("utf-8", False)


def _guess(sample: bytes, is_required: bool) -> str:
    """Return the codec that a text is in by its letters, or "".

    Raises:
        TextError: charset-normalizer is not installed, and the text cannot be read without it.
    """
    try:
        with needs_extra("it is not UTF-8, and this machine cannot find its encoding"):
            from charset_normalizer import from_bytes
    except TextError:
        if is_required:
            raise
        return ""
    matches = from_bytes(sample, cp_isolation=list(LETTERS_BY_CODEC), preemptive_behaviour=False)
    ranked = [name for match in matches for name in (match.encoding, *match.could_be_from_charset)]
    codec = choose_codec(sample, ranked)
    return codecs.lookup(codec).name if codec else ""


def decode_stream(file: Peekable, counts: DecodingCounts) -> Iterator[str]:
    """Decode a file piece by piece, with normalised line ends and without its mark.

    Raises:
        TextError: no encoding fits, or too many bytes are undecodable.
    """
    sample = file.peek_bytes(SAMPLE_BYTES)
    counts.encoding, counts.is_guess = find_encoding(sample)
    decoder = _Decoder(counts)
    is_undecided = counts.encoding == "utf-8" and sample.isascii()
    while data := file.read(READ_BYTES):
        if is_undecided and not data.isascii():
            is_undecided = False
            decoder.choose_codec(data)
        if text := decoder.decode(data):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text
    counts.encoding = counts.encoding.removesuffix("-sig")
    counts.check()


class _Decoder:
    """Decode pieces of one file, normalise its line ends and count undecodable bytes."""

    def __init__(self, counts: DecodingCounts) -> None:
        self._counts = counts
        self._decoder = self._open()

    def _open(self) -> io.IncrementalNewlineDecoder:
        # Only UTF-8 has an error handler that shows each undecodable byte.
        self._shows_bad_bytes = self._counts.encoding.startswith("utf-8")
        errors = "surrogateescape" if self._shows_bad_bytes else "replace"
        decoder = codecs.getincrementaldecoder(self._counts.encoding)(errors=errors)
        return io.IncrementalNewlineDecoder(decoder, translate=True)

    def choose_codec(self, data: bytes) -> None:
        """Choose the codec by the first data beyond ASCII; what is decoded is ASCII in any."""
        self._counts.encoding, self._counts.is_guess = _find_byte_encoding(data)
        _, state = self._decoder.getstate()
        self._decoder = self._open()
        if state & 1:  # a CR waits for the LF that may follow
            self._decoder.decode(b"\r")

    def decode(self, data: bytes, final: bool = False) -> str:
        self._counts.read_bytes += len(data)
        text = self._decoder.decode(data, final)
        self._counts.characters += len(text)
        self._counts.nuls += text.count("\0")
        if not self._shows_bad_bytes:
            self._counts.bad_bytes += text.count(REPLACEMENT)
            return text
        if self._counts.is_rows or text.isascii():
            return text
        text, bad_bytes = _SURROGATES.subn(REPLACEMENT, text)
        self._counts.bad_bytes += bad_bytes
        return text


def has_too_many(bad: int, total: int) -> bool:
    """Return whether a file has more undecodable bytes, or lone surrogates, than a text has."""
    return bad > max(FEW_BAD, MAX_BAD_SHARE * total)


def normalise_line_ends(text: str) -> str:
    """Replace CRLF and CR by LF, and remove a byte order mark at the start."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def has_undecodable(text: str) -> bool:
    """Return whether more than MAX_BAD_SHARE of a text are bytes that could not be decoded."""
    return not text.isascii() and len(_UNDECODABLE.findall(text)) > MAX_BAD_SHARE * len(text)


def replace_surrogates(text: str) -> tuple[str, int]:
    """Replace lone surrogates, which JSON can spell and UTF-8 cannot; return their number too."""
    if text.isascii():
        return text, 0
    return _SURROGATES.subn(REPLACEMENT, text)
