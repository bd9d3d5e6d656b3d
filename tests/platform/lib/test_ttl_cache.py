"""Test the in-process cache whose entries expire."""

import time

from coordinator.lib.ttl_cache import TtlCache


def test_cached_value_expires_after_its_time():
    cache: TtlCache[str, float] = TtlCache(0.05)
    first = cache.get("a", time.monotonic)
    assert cache.get("a", time.monotonic) == first
    assert cache.get("b", time.monotonic) != first, "two keys share a value"
    assert cache.get("a", time.monotonic, fresh=True) > first
    time.sleep(0.06)
    reloaded = cache.get("a", time.monotonic)
    assert reloaded >= first + 0.05
    cache.invalidate("a")
    assert cache.get("a", time.monotonic) > reloaded
    other_value = cache.get("b", time.monotonic)
    cache.invalidate("a")
    assert cache.get("b", time.monotonic) == other_value, "another key was invalidated"
    TtlCache.clear_all()
    assert cache.get("b", time.monotonic) > other_value


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
