"""Tests of the thread pool over tiles."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.spec import ALIGN
from barnraise.swap import tile_threads
from barnraise.swap.tile_threads import BLOCK, SHARING_THREADS, for_each_tile, sharing_tiles


@given(
    st.integers(1, 100),
    st.integers(0, BLOCK // ALIGN - 1),
    st.sampled_from([1, 2, 3, 4, SHARING_THREADS]),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_for_each_tile_visits_every_element_once(blocks, rest, threads, shares):
    torch.set_num_threads(threads)
    n = blocks * BLOCK + rest * ALIGN
    visits, starts = torch.zeros(n), torch.full((-(-n // BLOCK),), -1)

    def work(scratch, offset, visited, first):
        assert scratch.fp32_scratch(0).shape == scratch.int16_scratch.shape == visited.shape
        assert len(first) == -(-len(visited) // BLOCK)
        visited.add_(1)
        first.copy_(torch.arange(len(first)).mul_(BLOCK).add_(offset))

    with sharing_tiles(shares):
        for_each_tile(work, visits, starts)
    assert torch.equal(visits, torch.ones(n))
    assert torch.equal(starts, torch.arange(len(starts)) * BLOCK)
    assert torch.get_num_threads() == threads, "the pool must not change the caller's number"


@pytest.mark.parametrize("threads", [1, 2])
def test_for_each_tile_raises_what_a_tile_raised(threads):
    torch.set_num_threads(threads)

    def work(scratch, offset, tile):
        raise ValueError(f"at {offset}")

    with pytest.raises(ValueError, match="at "):
        for_each_tile(work, torch.zeros(10 * BLOCK))


def test_many_threads_share_a_tile_only_where_that_is_wanted(monkeypatch):
    monkeypatch.setattr(tile_threads, "TILE", 2 * BLOCK)
    n = 64 * BLOCK

    def run(threads: int, shares: bool) -> tuple[set[int], set[str]]:
        """Return the lengths of the tiles, and the threads that went through them."""
        sizes, names = set(), set()

        def work(_, __, tile):
            sizes.add(tile.numel())
            names.add(threading.current_thread().name)

        torch.set_num_threads(threads)
        with sharing_tiles(shares):
            for_each_tile(work, torch.zeros(n))
        return sizes, names

    own = threading.current_thread().name
    assert run(SHARING_THREADS, True) == ({SHARING_THREADS * 2 * BLOCK, 4 * BLOCK}, {own})
    for threads, shares in ((SHARING_THREADS, False), (SHARING_THREADS - 1, True)):
        sizes, names = run(threads, shares)
        assert sizes == {2 * BLOCK} and own not in names
