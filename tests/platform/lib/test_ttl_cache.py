"""Test the in-process cache whose entries expire."""

from itertools import count
from types import SimpleNamespace

from coordinator.lib import ttl_cache
from coordinator.lib.ttl_cache import TtlCache


def test_cached_value_expires_after_its_time(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(ttl_cache, "time", SimpleNamespace(monotonic=lambda: clock.now))
    numbers = count()
    cache: TtlCache[str, int] = TtlCache(5.0)

    def get(key: str, fresh: bool = False) -> int:
        return cache.get(key, lambda: next(numbers), fresh=fresh)

    assert [get("a"), get("a"), get("b")] == [0, 0, 1], "two keys share a value"
    assert get("a", fresh=True) == 2
    clock.now += 4.9
    assert [get("a"), get("b")] == [2, 1]
    clock.now += 0.1
    assert get("a") == 3
    cache.invalidate("a")
    assert [get("a"), get("b")] == [4, 5]
    cache.invalidate("a")
    assert get("b") == 5, "another key was invalidated"
    TtlCache.clear_all()
    assert get("b") == 6


def test_cache_is_bounded_and_stores_no_missing_values():
    cache: TtlCache[int, int] = TtlCache(60.0, max_entries=3)
    for key in range(100):
        cache.get(key, lambda key=key: key)
    assert len(cache) <= 3
    calls = []
    for _ in range(2):
        try:
            cache.get(1000, lambda: calls.append(1) or 1 // 0)
        except ZeroDivisionError:
            continue
    assert len(calls) == 2
