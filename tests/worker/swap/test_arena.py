"""Tests of the arena's buffers."""

from barnraise.planning.plan import PAGE
from barnraise.swap import arena as arena_module
from barnraise.swap.arena import Arena


def test_arena_buffers_are_page_aligned_and_counted():
    """Direct I/O needs whole pages."""
    arena = Arena()
    buffers = [arena.allocate(size) for size in (1, PAGE, PAGE + 1, 10 * PAGE)]
    assert all(buffer.data_ptr() % PAGE == buffer.numel() % PAGE == 0 for buffer in buffers)
    assert arena.allocated == sum(buffer.numel() for buffer in buffers) == PAGE * (1 + 1 + 2 + 10)


def test_refused_pins_are_stated_once_with_their_cost(monkeypatch, caplog):
    answers = iter([0, 2])
    monkeypatch.setattr(arena_module, "register_host_memory", lambda *args: next(answers))
    arena = Arena(pins=True)
    for _ in range(4):  # the third and the fourth are not tried
        arena.allocate(10**6, crosses_link=True)
    arena.allocate(10**6)
    size = -(-(10**6) // PAGE) * PAGE
    assert (arena.pinned, arena.unpinned) == (size, 3 * size)
    arena.warn_if_unpinned()
    assert "refuses to pin 3 MB of the 4 MB" in caplog.text
    assert "CUDA error 2" in caplog.text and "75 %" in caplog.text


def test_arena_whose_pins_succeed_states_nothing(monkeypatch, caplog):
    monkeypatch.setattr(arena_module, "register_host_memory", lambda *args: 0)
    arena = Arena(pins=True)
    arena.allocate(10**6, crosses_link=True)
    arena.warn_if_unpinned()
    assert not caplog.text
