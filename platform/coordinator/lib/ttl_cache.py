"""What this process found a moment ago and need not look up again. Not in Valkey: pages show it while that is gone."""

import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar
from weakref import WeakSet

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class TtlCache(Generic[Key, Value]):
    """Answers by key, each good for `seconds`; of `most` at a time."""

    every: WeakSet["TtlCache"] = WeakSet()

    def __init__(self, seconds: float, most: int = 1000):
        self.seconds, self.most = seconds, most
        self._known: dict[Key, tuple[float, Value]] = {}
        TtlCache.every.add(self)

    def get(self, key: Key, find: Callable[[], Value], *, fresh: bool = False) -> Value:
        """What `find` said of this key. `fresh`: what it says now."""
        kept = self._known.get(key)
        if kept and not fresh and time.monotonic() < kept[0]:
            return kept[1]
        found = find()
        if len(self._known) >= self.most:
            self._known.clear()
        self._known[key] = time.monotonic() + self.seconds, found
        return found

    def invalidate(self, key: Key) -> None:
        """It has changed."""
        self._known.pop(key, None)

    @classmethod
    def clear_all(cls) -> None:
        """All of them all they know."""
        for memo in cls.every:
            memo._known.clear()
