"""What a process remembers for a moment."""

import time

from coordinator.lib.ttl_cache import TtlCache


def test_an_answer_is_good_for_its_time_and_no_longer():
    memo: TtlCache[str, float] = TtlCache(0.05)
    first = memo.get("a", time.monotonic)
    assert memo.get("a", time.monotonic) == first
    assert memo.get("b", time.monotonic) != first, "another key is another answer"
    assert memo.get("a", time.monotonic, fresh=True) > first
    time.sleep(0.06)
    again = memo.get("a", time.monotonic)
    assert again >= first + 0.05
    memo.invalidate("a")
    assert memo.get("a", time.monotonic) > again
    kept = memo.get("b", time.monotonic)
    memo.invalidate("a")
    assert memo.get("b", time.monotonic) == kept, "only that one"
    TtlCache.clear_all()
    assert memo.get("b", time.monotonic) > kept


def test_cache_is_bounded_and_stores_no_missing_values():
    memo: TtlCache[int, int] = TtlCache(60.0, max_entries=3)
    for key in range(100):
        memo.get(key, lambda key=key: key)
    assert len(memo) <= 3
    asked = []
    for _ in range(2):
        try:
            memo.get(1000, lambda: asked.append(1) or 1 // 0)
        except ZeroDivisionError:
            continue
    assert len(asked) == 2
