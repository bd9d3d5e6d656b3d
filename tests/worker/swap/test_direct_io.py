"""Tests of the file that bypasses the page cache, and of checksums."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.errors import StateError
from barnraise.planning.plan import PAGE
from barnraise.swap.arena import page_aligned
from barnraise.swap.direct_io import REQUEST_BYTES, DirectFile, checksum

SECTORS = 5
NOISE = torch.randint(
    0, 256, (SECTORS * PAGE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, NOISE.numel() - 1), bit=st.integers(0, 7))
def test_checksum_finds_any_flipped_bit(at, bit):
    flipped = NOISE.clone()
    flipped[at] ^= 1 << bit
    assert checksum(flipped) != checksum(NOISE)


@settings(max_examples=40, deadline=None)
@given(
    one=st.integers(0, SECTORS - 1), other=st.integers(0, SECTORS - 1), seed=st.integers(1, 1 << 30)
)
def test_checksum_finds_lost_stale_and_swapped_sectors(one, other, seed):
    sectors = NOISE.view(SECTORS, PAGE)
    zeroed, stale, swapped = sectors.clone(), sectors.clone(), sectors.clone()
    zeroed[one] = 0
    stale[one] = torch.randint(
        0, 256, (PAGE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    swapped[[one, other]] = sectors[[other, one]]
    assert checksum(zeroed.view(-1)) != checksum(NOISE) != checksum(stale.view(-1))
    assert (checksum(swapped.view(-1)) == checksum(NOISE)) == (one == other)


def test_checksum_covers_a_partial_last_sector():
    part = NOISE[: PAGE + 64].clone()
    before = checksum(part)
    part[-1] ^= 1
    assert checksum(part) != before


@settings(max_examples=40, deadline=None)
@given(
    writes=st.lists(
        st.tuples(st.integers(0, 15), st.integers(1, 6), st.integers(0, 255)), max_size=8
    )
)
def test_direct_file_reads_back_what_was_written_and_nothing_else(writes, tmp_path_factory):
    folder, mirror = tmp_path_factory.mktemp("disk"), torch.zeros(24 * PAGE, dtype=torch.uint8)
    disk = DirectFile(folder / "state.bin", mirror.numel())
    for page, count, value in writes:
        data = page_aligned(count * PAGE).fill_(value)
        disk.write(page * PAGE, data)
        mirror[page * PAGE : (page + count) * PAGE] = data
    content = page_aligned(mirror.numel())
    disk.read(0, content)
    disk.close()
    assert torch.equal(content, mirror)


def test_direct_file_transfers_more_than_one_request(tmp_path):
    size = 2 * REQUEST_BYTES + 3 * PAGE
    disk = DirectFile(tmp_path / "state.bin", size)
    data, back = page_aligned(size), page_aligned(size)
    data.view(torch.int64).copy_(torch.arange(size // 8))
    disk.write(0, data)
    disk.read(0, back)
    disk.close()
    assert torch.equal(data, back)


def test_direct_file_bypasses_the_page_cache_where_possible(tmp_path):
    disk = DirectFile(tmp_path / "state.bin", PAGE)
    try:
        os.close(os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        is_supported = True
    except (AttributeError, OSError):
        is_supported = False
    assert disk.direct == is_supported
    disk.close()


def test_direct_file_reserves_space_and_reading_past_it_fails(tmp_path):
    path = tmp_path / "deep" / "state.bin"
    disk = DirectFile(path, 64 * PAGE)
    assert path.stat().st_size == 64 * PAGE and path.stat().st_blocks * 512 >= 64 * PAGE
    os.truncate(path, PAGE)
    with pytest.raises(OSError, match="ends at"):
        disk.read(0, page_aligned(2 * PAGE))
    disk.close()


def test_direct_file_names_an_impossible_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"file.*cannot hold the model's state"):
        DirectFile(tmp_path / "file" / "state.bin", PAGE)
