"""Go through flat buffers tile by tile with several threads, with scratch buffers for each.

Ten operations over a whole fragment stream it through memory ten times. Tile by tile, everything
between the first and the last operation stays in the cache. Each thread computes its tile alone:
torch's own threads share every operation and wait for each other after it, for milliseconds when
another program occupies the core of one of them.

Python's lock lets one thread at a time start an operation. With many threads they wait for it more
than they compute, and so does the thread that launches a GPU's kernels. There torch's threads share
the operations of one large tile (`sharing_tiles`).
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import Tensor

from barnraise.planning import memory_model

# Tiles begin on multiples of a block. A CPU's tile has 2 MB, which fits the cache of several
# threads: with smaller tiles, Python and its lock take a noticeable share of the time. A GPU is
# efficient with few large calls.
BLOCK = memory_model.TILE_BLOCK
TILE = memory_model.CPU_TILE
DEVICE_TILE = memory_model.GPU_TILE
# From so many threads on they share a tile, of so many times TILE at most. Measured with 16.
SHARING_THREADS = 6
SHARED_TILES = 8


class Scratch:
    """The scratch buffers of one thread, allocated on first use, of undefined content."""

    def __init__(self, n: int, flats: dict[str, Tensor], device: torch.device) -> None:
        self._n, self._flats, self._device = n, flats, device

    def fp32_scratch(self, number: int) -> Tensor:
        """Return fp32 [n] buffer `number`."""
        return self._flat_buffer(f"fp32 {number}")

    @property
    def int16_scratch(self) -> Tensor:
        """Return an int16 [n] buffer."""
        return self._flat_buffer("int16").view(torch.int16)[: self._n]

    @property
    def int16_spare(self) -> Tensor:
        """Return a second int16 [n] buffer."""
        return self._flat_buffer("int16").view(torch.int16)[self._n :]

    @property
    def fp16_scratch(self) -> Tensor:
        """Return `int16_scratch` as fp16 [n]: the same memory."""
        return self.int16_scratch.view(torch.float16)

    def _flat_buffer(self, name: str) -> Tensor:
        flat = self._flats.get(name)
        if flat is None or flat.numel() < self._n:
            flat = self._flats[name] = torch.empty(self._n, device=self._device)
        return flat if flat.numel() == self._n else flat[: self._n]


class _ThreadState(threading.local):
    """The calling thread's buffers, and whether torch's threads share its tiles."""

    def __init__(self) -> None:
        self.buffers: dict[torch.device, dict[str, Tensor]] = {}  # by device and name
        self.shares_tiles = False


_thread = _ThreadState()


@contextlib.contextmanager
def sharing_tiles(shares: bool = True) -> Iterator[None]:
    """Let torch's threads, if there are many, share the tiles of the calling thread in the block.

    Only where no other thread computes with torch's threads meanwhile: on a machine with a GPU.
    """
    before = _thread.shares_tiles
    _thread.shares_tiles = shares
    try:
        yield
    finally:
        _thread.shares_tiles = before


def scratch_bytes() -> int:
    """Return the bytes of the calling thread's scratch buffers."""
    return sum(flat.nbytes for flats in _thread.buffers.values() for flat in flats.values())


def device_pieces(flat: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of the pieces in which [n] is converted between steps: whole on a CPU.

    On a device each piece has temporary copies, which the memory model counts.
    """
    n = flat.numel()
    size = n if flat.device.type == "cpu" else memory_model.GPU_PIECE
    for begin in range(0, n, max(1, size)):
        yield begin, min(begin + size, n)


def for_each_tile(work: Callable[..., object], *flats: Tensor) -> None:
    """Call work(scratch, offset, *parts) for every tile of the tensors.

    Uses as many threads as torch computes with in the calling thread: each with tiles of its own,
    or all for one tile after the other in the calling thread (`sharing_tiles`). Tiles come in any
    order. A last block that is not whole is a tile of its own.

    Args:
        work: receives scratch buffers as long as the tile, the tile's first element, and the tile's
            part of each tensor.
        flats: tensors of [n], or of [⌈n / BLOCK⌉], one element a block; the first has n elements.

    Raises:
        Exception: what `work` raised, once all threads have ended.
    """
    n, device = flats[0].numel(), flats[0].device
    threads, largest = torch.get_num_threads(), TILE
    if device.type != "cpu":
        threads, largest = 1, DEVICE_TILE
    elif _thread.shares_tiles and threads >= SHARING_THREADS:
        threads, largest = 1, min(threads, SHARED_TILES) * TILE
    sizes = _tile_sizes(n, threads, largest)
    blocks = [-(-size // BLOCK) for size in sizes]
    offsets = [0, *itertools.accumulate(sizes)][:-1]
    parts = [flat.split(sizes if flat.numel() == n else blocks) for flat in flats]
    tiles = iter(list(zip(sizes, offsets, *parts, strict=True)))

    @torch.no_grad()
    def work_off_tiles() -> None:
        for size, *tile in tiles:  # shared by the threads: an idle one gets the next tile
            work(_scratch_of(device, size), *tile)

    if min(threads, len(sizes)) < 2:
        work_off_tiles()
    else:
        futures = [_thread_pool(threads).submit(work_off_tiles) for _ in range(threads)]
        wait(futures)
        for future in futures:
            future.result()


def _tile_sizes(n: int, threads: int, largest: int) -> list[int]:
    """Return the elements of each tile: whole blocks, a tile for each thread, and the rest."""
    whole = n // BLOCK * BLOCK
    share = -(-whole // (threads * BLOCK)) * BLOCK
    tile = max(BLOCK, min(largest, share))
    sizes = [min(tile, whole - begin) for begin in range(0, whole, tile)]
    if n > whole:
        sizes.append(n - whole)
    return sizes


def _scratch_of(device: torch.device, n: int) -> Scratch:
    return Scratch(n, _thread.buffers.setdefault(device, {}), device)


@functools.cache
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    """Return the pool of so many threads, whose threads compute with one torch thread each."""
    ready = threading.Barrier(threads)
    pool = ThreadPoolExecutor(threads, "barnraise-tiles", lambda: torch.set_num_threads(1))
    list(pool.map(lambda _: ready.wait(), range(threads)))  # until all threads have started
    torch.set_num_threads(threads)  # torch gives new threads the number that was set last
    return pool
