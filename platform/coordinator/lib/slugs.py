"""Write the names of runs and teams as parts of addresses. Pure."""

import re
import unicodedata

from django.urls.converters import StringConverter

LETTERS_AND_DIGITS = ("L", "M", "Nd")  # beginnings of Unicode's categories
# Marks that choose the form of a letter or emoji, or enclose it. They are nothing to read.
FORM_MARKS = re.compile("[\u20d0-\u20ff\ufe00-\ufe0f\U000e0100-\U000e01ef]")


def slug_of(name: str) -> str:
    """Join a name's words by hyphens; return "" if it has no letter or digit.

    Accents of Latin letters are left out, and letters of other scripts stay as they are.
    """
    parts = unicodedata.normalize("NFKD", name)
    plain = _join_words("".join(c for c in parts if not unicodedata.combining(c)))
    return plain if plain.isascii() else _join_words(name)


def _join_words(text: str) -> str:
    kept = (
        c
        for c in normalize_slug(normalize_slug(FORM_MARKS.sub("", text)).lower())
        if c in "-_ " or unicodedata.category(c).startswith(LETTERS_AND_DIGITS)
    )
    return re.sub("[ -]+", "-", "".join(kept)).strip("-_")[:60]


def normalize_slug(text: str) -> str:
    """Return the one form of a slug that keyboards and file systems write in several forms."""
    return unicodedata.normalize("NFKC", text)


class SlugConverter(StringConverter):
    """Match a slug in an address."""

    regex = r"[^/\x00]+"
