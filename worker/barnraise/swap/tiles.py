"""A fragment's weights tile by tile, between steps, on whichever tier they lie."""

from collections.abc import Iterator

from torch import Tensor

from barnraise.planning.plan import Plan
from barnraise.swap.adam_moments import AdamMoments
from barnraise.swap.buffers import Buffers
from barnraise.swap.state_store import StateStore


class Tiles:
    def __init__(self, plan: Plan, store: StateStore, buffers: Buffers):
        self.plan, self.store, self.buffers = plan, store, buffers

    def iterate(
        self, i: int, changes: bool = True, reads: bool = True
    ) -> Iterator[tuple[int, int, AdamMoments, Tensor]]:
        """(begin, end, moments, weights as streamed) of fragment i's tiles; what was done to the weights is kept when
        the next is asked for. Moments are read only where they hold half of the weights."""
        plan, store = self.plan, self.store
        split = plan.dtype == "bfloat16"
        for t in range(plan.tile_count(i)):
            begin, end = plan.bounds(i, t)
            n = end - begin
            raw = self.record("weights", i, t, 0, reads)
            record = self.record("moments", i, t, 4, split and plan.on_disk)
            moments = AdamMoments.of(plan, record, n)
            yield begin, end, moments, raw[: n * plan.streamed_bytes].view(self.buffers.dtype)
            if changes:
                store.store_tile("weights", i, t, raw)
                if split:
                    store.store_tile("moments", i, t, record)

    def record(self, kind: str, i: int, t: int, spare: int, reads: bool) -> Tensor:
        """A tile's record; what it holds on disk only if `reads`."""
        if self.store.memory_buffer(kind, i) is not None:
            return self.store.memory_record(kind, i, t)
        begin, end = self.plan.bounds(i, t)
        into = self.buffers.tile_scratch(spare)[: self.plan.record(kind, end - begin)]
        if reads:
            self.store.read(kind, i, t, into)
        return into

    @staticmethod
    def set_weights(moments: AdamMoments, weights: Tensor, master: Tensor) -> None:
        """The weights are `master`, fp32, from now on."""
        master = master.to(weights.device)
        if moments.low is None:
            weights.copy_(master)
        else:
            moments.store_master(weights, master)
