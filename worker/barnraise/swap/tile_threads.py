"""Threads that go through flat buffers tile by tile, each with scratch of its own.

Ten operations over a whole fragment stream it through memory ten times; tile by tile, all between the first and the
last stays in cache. And a thread computes its tile alone: torch's own threads share every operation and wait for each
other after it, for milliseconds when something else has the core of one (on a machine that trains, something has).
"""

import functools
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import Tensor

BLOCK = 2048  # elements: tiles begin on multiples of it
TILE = (
    1 << 19
)  # elements: two megabytes that several threads' cache may hold; with fewer, Python and its lock count
DEVICE_TILE = 1 << 22  # on a GPU, which wants few large calls


class Scratch:
    """Buffers of one thread, fp32 [n] each and views of them, there once they are asked for; what is in them when work
    begins is nobody's."""

    def __init__(self, n: int, flats: dict[str, Tensor], device: torch.device):
        self._n, self._flats, self._device = n, flats, device

    def _flat(self, name: str) -> Tensor:
        flat = self._flats.get(name)
        if flat is None or flat.numel() < self._n:
            flat = self._flats[name] = torch.empty(self._n, device=self._device)
        return flat if flat.numel() == self._n else flat[: self._n]

    a, b, c, e = (property(lambda self, name=name: self._flat(name)) for name in "abce")

    @property
    def int16_scratch(self) -> Tensor:
        return self._flat("d").view(torch.int16)[: self._n]

    @property
    def int16_spare(self) -> Tensor:
        return self._flat("d").view(torch.int16)[self._n :]

    @property
    def fp16_scratch(self) -> Tensor:
        return self.int16_scratch.view(torch.float16)


_own = threading.local()  # each thread's buffers, by device and name


def for_each_tile(work: Callable[..., None], *flats: Tensor) -> None:
    """Calls work(scratch, offset, *parts) for every tile of the tensors: [n], or [⌈n / BLOCK⌉], an element a block.
    Scratch is as long as the tile. In any order, on as many threads as torch computes with here. A last block that is
    not whole is a tile of its own. Raises what `work` raised, once no thread is at it any more."""
    n, device = flats[0].numel(), flats[0].device
    tile, threads = (TILE, torch.get_num_threads()) if device.type == "cpu" else (DEVICE_TILE, 1)
    whole = n // BLOCK * BLOCK
    share = -(-whole // (threads * BLOCK)) * BLOCK
    tile = max(BLOCK, min(tile, share))
    sizes = [min(tile, whole - begin) for begin in range(0, whole, tile)] + [n - whole] * (
        n > whole
    )
    blocks = [-(-size // BLOCK) for size in sizes]
    offsets = [0, *itertools.accumulate(sizes)][:-1]
    parts = [flat.split(sizes if flat.numel() == n else blocks) for flat in flats]
    left = iter(list(zip(sizes, offsets, *parts, strict=True)))

    @torch.no_grad()
    def some() -> None:
        for size, *rest in left:  # whoever is free takes the next
            work(_scratch(device, size), *rest)

    if min(threads, len(sizes)) < 2:
        some()
    else:
        done = [_crew(threads).submit(some) for _ in range(threads)]
        wait(done)
        for each in done:
            each.result()


def _scratch(device: torch.device, n: int) -> Scratch:
    return Scratch(n, _own.__dict__.setdefault(device, {}), device)


@functools.cache
def _crew(threads: int) -> ThreadPoolExecutor:
    ready = threading.Barrier(threads)
    crew = ThreadPoolExecutor(threads, "barnraise-crew", lambda: torch.set_num_threads(1))
    list(crew.map(lambda _: ready.wait(), range(threads)))  # until all are there
    torch.set_num_threads(threads)  # in torch the number set last is what new threads begin with
    return crew
