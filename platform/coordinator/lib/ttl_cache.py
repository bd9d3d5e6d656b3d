"""Cache values in this process for a short time.

Not in Valkey, because pages show these values while Valkey is gone.
"""

import time
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class TtlCache(Generic[Key, Value]):
    """Cache values by key, each for `seconds`; at most `max_entries` at a time."""

    instances: WeakSet["TtlCache[Any, Any]"] = WeakSet()

    def __init__(self, seconds: float, max_entries: int = 1000) -> None:
        self.seconds = seconds
        self.max_entries = max_entries
        self._entries: dict[Key, tuple[float, Value]] = {}  # key → (expiry, value)
        TtlCache.instances.add(self)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key, compute: Callable[[], Value], *, fresh: bool = False) -> Value:
        """Return the cached value of a key, or compute and cache it; with `fresh`, in any case.

        What `compute` raises is not cached.
        """
        entry = self._entries.get(key)
        if entry and not fresh and time.monotonic() < entry[0]:
            return entry[1]
        value = compute()
        if len(self._entries) >= self.max_entries:
            self._entries.clear()
        self._entries[key] = (time.monotonic() + self.seconds, value)
        return value

    def invalidate(self, key: Key) -> None:
        """Remove the value of a key that has changed."""
        self._entries.pop(key, None)

    @classmethod
    def clear_all(cls) -> None:
        """Empty every cache of this process."""
        for cache in cls.instances:
            cache._entries.clear()
