"""Read JSON as other programs write it: with long numbers, deep lists and cut-off ends. Pure."""

import json
from collections.abc import Callable
from typing import Any

MAX_DIGITS = 1000  # of an integer; a longer one becomes a float, which may be infinite
LITERAL_CHARACTERS = len("-Infinity")  # the longest; a text may be cut inside of one

ReadObject = Callable[[list[tuple[str, Any]]], dict[str, Any]]


class JsonReader(json.JSONDecoder):
    """Read values of JSON; raise JSONDecodeError also for what is nested too deeply.

    Args:
        read_object: makes an object of its names and values.
    """

    def __init__(self, read_object: ReadObject = dict) -> None:
        super().__init__(object_pairs_hook=read_object, parse_int=_read_integer)

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        """Return the value that begins at a position, and where it ends."""
        try:
            return super().raw_decode(s, idx)
        except RecursionError:
            raise json.JSONDecodeError("nested too deeply", s, idx) from None


def _read_integer(digits: str) -> float:
    return int(digits) if len(digits) < MAX_DIGITS else float(digits)


def is_cut_off(text: str, error: json.JSONDecodeError) -> bool:
    """Return whether a text without white space at its end is JSON up to there, and is cut off."""
    if error.pos >= len(text) or error.msg.startswith("Unterminated string"):
        return True
    is_near_end = error.pos > len(text) - LITERAL_CHARACTERS and error.msg != "Extra data"
    return is_near_end and text[-1] not in "]}" and text[0] in '{["'
