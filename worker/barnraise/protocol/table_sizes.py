"""How many entries a table has that others can fill; the oldest makes room for the newest.

A table without a bound is memory that a stranger fills. A table that is too small forgets honest
entries in a flood, which costs only work that is done again. So the size need not be exact, and
follows from what one entry takes: a full table has about a megabyte.
"""

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

MANY = 4096  # entries of some hundred bytes: a key and a time, a level, a counter
SOME = 1024  # entries of about a kilobyte, or that stand for machines this one dealt with itself
FEW = 256  # entries of several kilobytes, or that each of many links has


def store_newest(table: dict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Store a value as the newest of a table; beyond `most` entries the oldest ones make room."""
    table.pop(key, None)
    table[key] = value
    while len(table) > most:
        del table[next(iter(table))]
