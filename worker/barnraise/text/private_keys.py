"""Recognise private keys in texts, which must not be sent to other machines. Pure."""

import re
from collections.abc import Iterable, Iterator

from barnraise.errors import TextError

HOLDS_PRIVATE_KEY = "it holds a private key"  # why a file is left out
_KEY = r"-{4,5} ?BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)? ?-{4,5}|AGE-SECRET-KEY-1[A-Z0-9]{40}"
_KEY_IN_TEXT = re.compile(_KEY)
_KEY_IN_BYTES = re.compile(_KEY.encode())
_SIGNS = ("PRIVATE KEY", "AGE-SECRET-KEY-1")  # looked for first: they are found much faster
_MAX_CHARACTERS = 128  # of what makes a key recognisable


def holds_private_key(text: str) -> bool:
    """Return whether a text holds a private key: in PEM, of SSH, PGP or age."""
    return any(sign in text for sign in _SIGNS) and _KEY_IN_TEXT.search(text) is not None


def is_first_line_of_key(text: str) -> bool:
    """Return whether a text consists of the first line of a private key alone."""
    return _KEY_IN_TEXT.fullmatch(text.strip()) is not None


def head_holds_private_key(head: bytes) -> bool:
    """Return whether the first bytes of a file hold a private key, in UTF-8 or UTF-16."""
    return any(_KEY_IN_BYTES.search(data) for data in (head, head.replace(b"\0", b"")))


def refuse_private_keys(pieces: Iterable[str]) -> Iterator[str]:
    """Yield the pieces of a text up to a private key, which two pieces may share.

    Raises:
        TextError: the text holds one.
    """
    end = ""
    for piece in pieces:
        text = end + piece
        if holds_private_key(text):
            raise TextError(HOLDS_PRIVATE_KEY)
        yield piece
        end = text[-_MAX_CHARACTERS:]
