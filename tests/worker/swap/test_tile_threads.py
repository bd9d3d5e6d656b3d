"""Tests of the thread pool over tiles."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.spec import ALIGN
from barnraise.swap.tile_threads import BLOCK, for_each_tile


@pytest.fixture(autouse=True)
def _restore_thread_count():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@given(st.integers(1, 100), st.integers(0, BLOCK // ALIGN - 1), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_for_each_tile_visits_every_element_once(blocks, rest, threads):
    torch.set_num_threads(threads)
    n = blocks * BLOCK + rest * ALIGN
    visits, starts = torch.zeros(n), torch.full((-(-n // BLOCK),), -1)

    def work(scratch, offset, visited, first):
        assert scratch.fp32_scratch(
            0
        ).shape == scratch.int16_scratch.shape == visited.shape and len(first) == -(
            -len(visited) // BLOCK
        )
        visited.add_(1)
        first.copy_(torch.arange(len(first)).mul_(BLOCK).add_(offset))

    for_each_tile(work, visits, starts)
    assert torch.equal(visits, torch.ones(n)) and torch.equal(
        starts, torch.arange(len(starts)) * BLOCK
    )
    assert torch.get_num_threads() == threads, "the pool must not change the caller's number"


@pytest.mark.parametrize("threads", [1, 2])
def test_for_each_tile_raises_what_a_tile_raised(threads):
    torch.set_num_threads(threads)

    def work(scratch, offset, tile):
        raise ValueError(f"at {offset}")

    with pytest.raises(ValueError, match="at "):
        for_each_tile(work, torch.zeros(10 * BLOCK))
