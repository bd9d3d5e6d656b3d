"""Read JSON as other programs write it: with long numbers, deep lists and cut-off ends. Pure."""

import json
from collections.abc import Callable
from typing import Any

MAX_DIGITS = 1000  # of an integer; a longer one becomes a float, which may be infinite
LITERAL_CHARACTERS = len("-Infinity")  # the longest; a text may be cut inside of one


class JsonReader(json.JSONDecoder):
    """Read values; `read_object` makes an object of its names and values."""

    def __init__(
        self, read_object: Callable[[list[tuple[str, Any]]], dict[str, Any]] = dict
    ) -> None:
        super().__init__(object_pairs_hook=read_object, parse_int=_read_integer)

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        """Return the value at a position, and where it ends; raise JSONDecodeError for none."""
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
