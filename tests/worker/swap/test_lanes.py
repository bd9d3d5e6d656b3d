"""Lanes, events, checksums and the disk past the page cache."""

import os
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.errors import StateError
from barnraise.swap.arena import PAGE, Arena, page_aligned
from barnraise.swap.direct_io import REQUEST_BYTES, DirectFile, checksum
from barnraise.swap.lanes import WorkerLane


@pytest.fixture
def lane():
    made: list[WorkerLane] = []

    def new(**how) -> WorkerLane:
        made.append(WorkerLane("test", **how))
        return made[-1]

    yield new
    for each in made:
        each.close()


# ---- lanes -------------------------------------------------------------------------------------------------------


def test_a_lane_works_in_the_order_given_even_when_what_is_first_must_wait(lane):
    done, work, gate = [], lane(), lane()
    release = threading.Event()
    opened = gate.submit(release.wait)
    work.submit(lambda: done.append(1), [opened])
    last = work.submit(lambda: done.append(2))
    time.sleep(0.05)
    assert done == []
    release.set()
    last.wait()
    assert done == [1, 2]


def test_an_eager_lane_takes_what_can_begin_and_of_that_the_most_urgent(lane):
    done, work, gate = [], lane(eager=True), lane()
    release, hold = threading.Event(), threading.Event()
    opened = gate.submit(release.wait)
    work.submit(hold.wait)  # so that all the rest is there to choose from
    work.submit(lambda: done.append("waits"), [opened], urgency=0)
    for name, urgency in (("later", 3), ("sooner", 1), ("middle", 2)):
        last = work.submit(lambda name=name: done.append(name), urgency=urgency)
    hold.set()
    last.wait()
    while len(done) < 3:
        time.sleep(0.001)
    release.set()
    work.wait_until_idle()
    assert done == ["sooner", "middle", "later", "waits"]


def test_who_waits_for_what_failed_gets_the_failure_and_the_lane_goes_on(lane):
    work, other = lane(), lane()

    def fail() -> None:
        raise OSError(5, "Input/output error")

    failed = work.submit(fail)
    depends = other.submit(lambda: None, [failed])
    fine = work.submit(lambda: None)
    for event in (failed, depends):
        with pytest.raises(OSError, match="Input/output"):
            event.wait()
    fine.wait()


def test_an_inline_lane_works_in_the_callers_thread_and_raises_at_once(lane):
    work, seen = lane(inline=True), []
    work.submit(lambda: seen.append(threading.current_thread())).wait()
    assert seen == [threading.current_thread()]
    with pytest.raises(ZeroDivisionError):
        work.submit(lambda: 1 / 0)


def test_settling_waits_for_all_that_was_submitted(lane):
    work, done = lane(), []
    for n in range(5):
        work.submit(lambda n=n: (time.sleep(0.01), done.append(n)))
    work.wait_until_idle()
    assert done == [0, 1, 2, 3, 4]


def test_a_lane_has_its_own_number_of_threads_and_leaves_the_callers_alone(lane):
    before = torch.get_num_threads()
    seen: list[int] = []
    lane(threads=1).submit(lambda: seen.append(torch.get_num_threads())).wait()
    torch.set_num_threads(before)
    assert seen == [1] and torch.get_num_threads() == before


# ---- checksums ---------------------------------------------------------------------------------------------------

SECTORS = 5
NOISE = torch.randint(
    0, 256, (SECTORS * PAGE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, NOISE.numel() - 1), bit=st.integers(0, 7))
def test_a_checksum_finds_any_flipped_bit(at, bit):
    flipped = NOISE.clone()
    flipped[at] ^= 1 << bit
    assert checksum(flipped) != checksum(NOISE)


@settings(max_examples=40, deadline=None)
@given(
    one=st.integers(0, SECTORS - 1), other=st.integers(0, SECTORS - 1), seed=st.integers(1, 1 << 30)
)
def test_a_checksum_finds_sectors_that_were_lost_kept_from_before_or_put_elsewhere(
    one, other, seed
):
    sectors = NOISE.view(SECTORS, PAGE)
    zeroed, stale, swapped = sectors.clone(), sectors.clone(), sectors.clone()
    zeroed[one] = 0
    stale[one] = torch.randint(
        0, 256, (PAGE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    swapped[[one, other]] = sectors[[other, one]]
    assert checksum(zeroed.view(-1)) != checksum(NOISE) != checksum(stale.view(-1))
    assert (checksum(swapped.view(-1)) == checksum(NOISE)) == (one == other)


def test_a_checksum_is_of_every_word_of_a_last_sector_that_is_not_whole():
    part = NOISE[: PAGE + 64].clone()
    before = checksum(part)
    part[-1] ^= 1
    assert checksum(part) != before


# ---- disk --------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    writes=st.lists(
        st.tuples(st.integers(0, 15), st.integers(1, 6), st.integers(0, 255)), max_size=8
    )
)
def test_what_was_written_is_read_back_and_nothing_else_changes(writes, tmp_path_factory):
    folder, mirror = tmp_path_factory.mktemp("disk"), torch.zeros(24 * PAGE, dtype=torch.uint8)
    disk = DirectFile(folder / "state.bin", mirror.numel())
    for page, count, value in writes:
        data = page_aligned(count * PAGE).fill_(value)
        disk.write(page * PAGE, data)
        mirror[page * PAGE : (page + count) * PAGE] = data
    back = page_aligned(mirror.numel())
    disk.read(0, back)
    disk.close()
    assert torch.equal(back, mirror)


def test_more_than_one_request_arrives_whole(tmp_path):
    size = 2 * REQUEST_BYTES + 3 * PAGE
    disk = DirectFile(tmp_path / "state.bin", size)
    data, back = page_aligned(size), page_aligned(size)
    data.view(torch.int64).copy_(torch.arange(size // 8))
    disk.write(0, data)
    disk.read(0, back)
    disk.close()
    assert torch.equal(data, back)


def test_buffers_of_an_arena_are_what_a_direct_disk_wants():
    """Page-aligned wherever they are asked for, whole pages, and in the books."""
    arena = Arena()
    buffers = [arena.allocate(size) for size in (1, PAGE, PAGE + 1, 10 * PAGE)]
    assert all(buffer.data_ptr() % PAGE == buffer.numel() % PAGE == 0 for buffer in buffers)
    assert arena.allocated == sum(buffer.numel() for buffer in buffers) == PAGE * (1 + 1 + 2 + 10)


def test_a_disk_goes_past_the_page_cache_where_the_system_can(tmp_path):
    disk = DirectFile(tmp_path / "state.bin", PAGE)
    try:
        os.close(os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        can = True
    except (AttributeError, OSError):
        can = False
    assert disk.direct == can
    disk.close()


def test_space_is_taken_at_once_and_reading_past_it_is_an_error(tmp_path):
    path = tmp_path / "deep" / "state.bin"
    disk = DirectFile(path, 64 * PAGE)
    assert path.stat().st_size == 64 * PAGE and path.stat().st_blocks * 512 >= 64 * PAGE
    os.truncate(path, PAGE)
    with pytest.raises(OSError, match="ends at"):
        disk.read(0, page_aligned(2 * PAGE))
    disk.close()


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"file.*cannot hold the model's state"):
        DirectFile(tmp_path / "file" / "state.bin", PAGE)
