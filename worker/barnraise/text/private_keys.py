"""Recognise private keys in texts, which must not be sent to other machines. Pure."""

import re
from collections.abc import Iterable, Iterator

_KEY = r"-{4,5} ?BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)? ?-{4,5}|AGE-SECRET-KEY-1[A-Z0-9]{40}"
_KEY_IN_TEXT = re.compile(_KEY)
_KEY_IN_BYTES = re.compile(_KEY.encode())
_SIGNS = ("PRIVATE KEY", "AGE-SECRET-KEY-1")  # looked for first: they are found much faster
MAX_CHARACTERS = 128  # of what makes a key recognisable


def holds_private_key(text: str) -> bool:
    """Return whether a text holds a private key: in PEM, of SSH, PGP or age."""
    return any(sign in text for sign in _SIGNS) and _KEY_IN_TEXT.search(text) is not None


def head_holds_private_key(head: bytes) -> bool:
    """Return whether the first bytes of a file hold a private key, in UTF-8 or UTF-16."""
    return any(_KEY_IN_BYTES.search(data) for data in (head, head.replace(b"\0", b"")))


def watch_for_private_keys(pieces: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield each piece of a text, and whether a private key ends in it or in one before it.

    A key that two pieces share is found as well.
    """
    end = ""
    found = False
    for piece in pieces:
        found = found or holds_private_key(end + piece)
        yield piece, found
        end = (end + piece)[-MAX_CHARACTERS:]
