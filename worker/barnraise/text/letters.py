"""The letters of the languages that an encoding is used for, to check a guess of it. Pure.

Most bytes are some character in most encodings. A guess is right if nearly all characters beyond
ASCII are letters or punctuation of the languages for which the encoding is used.
"""

import re
from collections.abc import Sequence

MIN_LETTER_SHARE = 0.9  # of the characters beyond ASCII
_PUNCTUATION = "".join(
    ("\u2018-\u201f\u2013\u2014\u2022\u2026\u20ac\u2122", "\xa0\xa3\xa7\xa9\xab\xae\xb0\xb7\xbb")
)
_WESTERN = "ÄÖÜäöüßÀÂÆÇÈÉÊËÎÏÔŒÙÛàâæçèéêëîïôœùûÁÍÓÚÑáíóúñ¿¡ÃÕãõªºÅØåøÌÒìò"
_CENTRAL = "ĄĆĘŁŃÓŚŹŻąćęłńóśźżÁČĎÉĚÍŇŘŠŤÚŮÝŽáčďéěíňřšťúůýžĹĽŔĺľŐŰőűÖÜöüÄäĂÂÎȘȚŞŢăâîșțşţĐđß"
_CYRILLIC = "\u0400-\u045f\u0490\u0491\u2116"
_CHINESE = "\u2e80-\u9fff\uff00-\uffef\u3000-\u303f"
_JAPANESE = "\u3000-\u30ff\u4e00-\u9fff\uff00-\uffef"
# In the order in which they are preferred.
LETTERS_BY_CODEC = {
    "cp1252": _WESTERN,
    "cp1250": _CENTRAL,
    "iso8859_2": _CENTRAL,
    "cp1254": "ĞİŞÇÖÜÂÎÛğışçöüâîû",
    "cp1257": "ĀČĒĢĪĶĻŅŠŪŽāčēģīķļņšūžĄĘĖĮŲąęėįųÄÕÖÜäõöü",
    "cp1251": _CYRILLIC,
    "koi8_r": _CYRILLIC,
    "cp866": _CYRILLIC,
    "cp1253": "\u0370-\u03ff",
    "cp1255": "\u0590-\u05ff",
    "cp1256": "\u0600-\u06ff",
    "cp874": "\u0e00-\u0e7f",
    "cp932": _JAPANESE,
    "euc_jp": _JAPANESE,
    "gb18030": _CHINESE,
    "big5": _CHINESE,
    "cp949": f"\u1100-\u11ff\u3130-\u318f\uac00-\ud7af{_CHINESE}",
    "iso8859_15": _WESTERN,
    "mac_roman": _WESTERN,
    "cp437": _WESTERN,
}
# Codecs of languages that are written in Latin letters, most of them ASCII.
LATIN_CODECS = (
    *("cp1252", "cp1250", "iso8859_2", "cp1254", "cp1257", "iso8859_15", "mac_roman", "cp437"),
)
MIN_FOREIGN_SHARE = 0.2  # of the letters of a text in another script
_BEYOND_ASCII = re.compile("[^\\x00-\\x7f]")
_NEXT_TO_ASCII = re.compile("[A-Za-z][^\\x00-\\x7f]|[^\\x00-\\x7f](?=[A-Za-z])")
_ASCII_LETTERS = re.compile("[A-Za-z]")


def choose_codec(sample: bytes, ranked: Sequence[str]) -> str:
    """Return the codec of a text that is not UTF-8, or "" if none of the ranked ones is likely.

    Letters beyond ASCII stand within words of ASCII letters in Latin scripts, and make up words of
    their own in others. Among Latin codecs the one with most letters of its languages is chosen;
    Windows-1252, the commonest, where others have as many. Among other codecs the first is chosen.
    """
    latin = [
        codec
        for codec in LATIN_CODECS
        if _letter_share(sample, codec) >= MIN_LETTER_SHARE and _is_latin(sample, codec)
    ]
    if latin:
        order = [LATIN_CODECS[0], *ranked, *LATIN_CODECS]
        return max(latin, key=lambda codec: (_letter_share(sample, codec), -order.index(codec)))
    for codec in ranked:
        if codec in LATIN_CODECS or codec not in LETTERS_BY_CODEC:
            continue
        if _letter_share(sample, codec) >= MIN_LETTER_SHARE and _is_foreign(sample, codec):
            return codec
    return ""


def _letter_share(sample: bytes, codec: str) -> float:
    """Return which share of the characters beyond ASCII are letters of the codec's languages."""
    foreign = "".join(_BEYOND_ASCII.findall(sample.decode(codec, errors="replace")))
    letters = re.compile(f"[{LETTERS_BY_CODEC[codec]}{_PUNCTUATION}]")
    return len(letters.findall(foreign)) / max(1, len(foreign))


def _is_latin(sample: bytes, codec: str) -> bool:
    """Return whether most characters beyond ASCII are next to an ASCII letter."""
    text = sample.decode(codec, errors="replace")
    return 2 * len(_NEXT_TO_ASCII.findall(text)) >= len(_BEYOND_ASCII.findall(text))


def _is_foreign(sample: bytes, codec: str) -> bool:
    """Return whether a good part of the letters is beyond ASCII."""
    text = sample.decode(codec, errors="replace")
    foreign = len(_BEYOND_ASCII.findall(text))
    return foreign >= MIN_FOREIGN_SHARE * (foreign + len(_ASCII_LETTERS.findall(text)))
