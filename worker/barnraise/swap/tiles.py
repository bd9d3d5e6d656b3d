"""A fragment's weights tile by tile, between steps, on whichever tier they lie."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from barnraise.planning.plan import Plan
from barnraise.swap.adam_moments import AdamMoments
from barnraise.swap.muon_moments import view_moments
from barnraise.swap.state_store import StateStore
from barnraise.swap.tile_threads import device_pieces


def streamed_dtype(plan: Plan) -> torch.dtype:
    """Return the type in which weights are streamed and computed with."""
    return torch.bfloat16 if plan.dtype == "bfloat16" else torch.float32


@dataclass(frozen=True)
class Tile:
    """One tile of a fragment's weights, as views of wherever it lies.

    Attributes:
        fragment: the fragment's index.
        number: the tile's number in its fragment.
        begin: its first element in the fragment.
        moments: Adam's moments, with the low halves of split weights.
        weights: the weights as streamed [n], fp32 or bf16.
    """

    fragment: int
    number: int
    begin: int
    moments: AdamMoments
    weights: Tensor

    @property
    def size(self) -> int:
        """Return the number of elements n."""
        return self.weights.numel()

    @property
    def end(self) -> int:
        """Return the index after the tile's last element in the fragment."""
        return self.begin + self.size

    def master(self) -> Tensor:
        """Return the master weights, fp32 [n]: the tile's own memory if it is fp32."""
        return self.moments.master(self.weights)

    def host_master(self) -> Tensor:
        """Return the master weights, fp32 [n], in host memory: the tile's own where it can be."""
        if self.weights.device.type == "cpu":
            return self.master()
        master = torch.empty(self.size)
        for piece in self.pieces():
            master[piece.begin - self.begin : piece.end - self.begin].copy_(piece.master())
        return master

    def set_master(self, master: Tensor) -> None:
        """Write master weights, fp32 [n] in any memory, into the tile."""
        for piece in self.pieces():
            part = master[piece.begin - self.begin : piece.end - self.begin]
            piece.moments.store_master(piece.weights, part.to(piece.weights.device))

    def pieces(self) -> "Iterator[Tile]":
        """Yield the tile in parts, as views. Copies of one part take little of a device's memory.

        A tile in host memory is one piece.
        """
        for begin, end in device_pieces(self.weights):
            moments = self.moments.part(begin, end)
            weights = self.weights[begin:end]
            yield Tile(self.fragment, self.number, self.begin + begin, moments, weights)


@contextlib.contextmanager
def copied_to(device: torch.device, tile: Tile, gradient: Tensor) -> Iterator[tuple[Tile, Tensor]]:
    """Copy a tile with 32-bit moments and its gradient to a device, and the tile back at the end.

    Without copies where the tile lies there already. The copies take turns with the computations
    of the current stream, and the host waits for none of them.
    """
    if tile.weights.device.type == device.type:
        yield tile, gradient
        return
    home = {"m": tile.moments.m, "v": tile.moments.v, "low": tile.moments.low}
    parts = {name: part for name, part in home.items() if part is not None}
    copies = {name: part.to(device, non_blocking=True) for name, part in parts.items()}
    weights = tile.weights.to(device, non_blocking=True)
    moved = replace(tile, weights=weights, moments=replace(tile.moments, **copies))
    yield moved, gradient.to(device, non_blocking=True)
    tile.weights.copy_(weights, non_blocking=True)
    for name, part in parts.items():
        part.copy_(copies[name], non_blocking=True)


class Tiles:
    """Access to the weights and moments of all fragments, one tile at a time."""

    def __init__(self, store: StateStore) -> None:
        """Work on `store`."""
        self._plan, self._store = store.plan, store
        self._dtype = streamed_dtype(store.plan)

    def iterate(self, i: int, changes: bool = True, reads: bool = True) -> Iterator[Tile]:
        """Yield fragment i's tiles; what was done to one is stored when the next is requested.

        Args:
            i: the fragment's index.
            changes: whether the caller changes the weights.
            reads: whether the caller needs the weights as they are. Moments are read only where
                they hold half of the weights.
        """
        plan, store = self._plan, self._store
        split = plan.dtype == "bfloat16"
        for t in range(plan.tile_count(i)):
            begin, end = plan.tile_bounds(i, t)
            n = end - begin
            weights = store.load_tile("weights", i, t, reads)
            moments = store.load_tile("moments", i, t, split and plan.on_disk)
            streamed = weights[: n * plan.streamed_bytes].view(self._dtype)
            yield Tile(i, t, begin, view_moments(plan, i, t, moments), streamed)
            if changes:
                store.store_tile("weights", i, t, weights)
                if split:
                    store.store_tile("moments", i, t, moments)

    def read_moments(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the moments of fragment i as `write_moments` sets them; it is one tile."""
        return view_moments(
            self._plan, i, 0, self._store.memory_record("moments", i, 0)
        ).to_float32()

    def write_moments(self, i: int, m: Tensor, v: Tensor) -> None:
        """Set the moments of fragment i: m, fp32 [n], and v, fp32, of what AdamW trains."""
        for t, layout in enumerate(self._plan.tile_layouts(i)):
            record = self._store.load_tile("moments", i, t, reads=False)
            moments = view_moments(self._plan, i, t, record)
            second = v[layout.second_begin : layout.second_end]
            moments.load_float32(m[layout.begin : layout.end], second)
            self._store.store_tile("moments", i, t, record)
