"""Tests of the arena's buffers."""

from barnraise.planning.plan import PAGE
from barnraise.swap.arena import Arena


def test_arena_buffers_are_page_aligned_and_counted():
    """Direct I/O needs whole pages."""
    arena = Arena()
    buffers = [arena.allocate(size) for size in (1, PAGE, PAGE + 1, 10 * PAGE)]
    assert all(buffer.data_ptr() % PAGE == buffer.numel() % PAGE == 0 for buffer in buffers)
    assert arena.allocated == sum(buffer.numel() for buffer in buffers) == PAGE * (1 + 1 + 2 + 10)
