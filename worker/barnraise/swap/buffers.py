"""The static buffers a plan's operations work in: slots for weights, gradients, the ring. Allocated once."""

import torch
from torch import Tensor

from barnraise.planning.plan import Plan
from barnraise.planning.program import Op
from barnraise.swap.adam_moments import AdamMoments
from barnraise.swap.arena import Leaves
from barnraise.swap.state_store import StateStore

TILE_SCRATCH_BUFFERS = 4  # tiles of four bytes an element, for what is done between steps


class Buffers:
    """What lies where. "Compute memory" is the device's, or the RAM where there is no other."""

    def __init__(self, plan: Plan, store: StateStore):
        self.plan, self.store = plan, store
        compute = store.device if plan.staged else store.host
        fragments, block = plan.fragments, plan.fragments[1]
        self.dtype = torch.bfloat16 if plan.dtype == "bfloat16" else torch.float32

        self._slots = [
            compute.allocate(plan.record("weights", block.size)) for _ in range(plan.slots)
        ]
        self._slot_leaves = [Leaves(block, self._typed(raw, block.size)) for raw in self._slots]
        self._leaves: dict[int, Leaves] = {}
        for fragment in fragments:
            i = fragment.index
            held = store.memory_buffer("weights", i)
            if held is not None and (not plan.staged or plan.weights[i] == "device"):
                self._leaves[i] = Leaves(fragment, self._typed(held, fragment.size))
            elif i in (0, plan.last):
                raw = compute.allocate(plan.record("weights", fragment.size))
                self._leaves[i] = Leaves(fragment, self._typed(raw, fragment.size))

        pooled = any(not plan.own_gradient(i) for i in plan.blocks)
        self._pool = [
            compute.allocate(4 * block.size) for _ in range(plan.gradient_slots if pooled else 0)
        ]
        self._gradients = {
            f.index: compute.allocate(4 * f.size) for f in fragments if plan.own_gradient(f.index)
        }
        table = (plan.model.vocabulary, plan.model.width)
        self.head_gradient = compute.allocate_floats(table[0] * table[1]).view(table)
        self._host_gradients: list[Tensor] = []
        self._host_ends: dict[int, Tensor] = {}
        if plan.staged:
            self._host_gradients = [
                store.host.allocate(4 * block.size) for _ in range(plan.host_gradient_slots)
            ]
            self._host_ends = {
                i: store.host.allocate(4 * fragments[i].size)
                for i in (0, plan.last)
                if plan.weights[i] != "device"
            }
        reads_blocks = plan.staged and "disk" in plan.weights
        self._incoming = [
            store.host.allocate(plan.record("weights", block.size))
            for _ in range(plan.host_slots if reads_blocks else 0)
        ]
        through = any(plan.through_ring(i) for i in range(plan.last + 1))
        self._ring = [
            store.host.allocate(plan.ring_bytes()) for _ in range(plan.ring if through else 0)
        ]
        spare = max(plan.record("weights", plan.tile), plan.record("anchor", plan.tile))
        sizes = (
            [spare] * TILE_SCRATCH_BUFFERS + [plan.record("moments", plan.tile)]
            if plan.on_disk
            else []
        )
        self._spares = [store.host.allocate(size) for size in sizes]
        waiting = (plan.model.layers + 2) * plan.micro_batches if plan.boundaries == "host" else 0
        stream = plan.sequences * plan.model.context * plan.model.width
        self.streams = [store.host.allocate_floats(stream) for _ in range(waiting)]

    def _typed(self, raw: Tensor, n: int) -> Tensor:
        return raw[: n * self.dtype.itemsize].view(self.dtype)

    # ---- weights ---------------------------------------------------------------------------------------------

    def leaves(self, i: int, slot: int) -> Leaves:
        """Where fragment i's weights are computed with."""
        return self._slot_leaves[slot] if slot >= 0 else self._leaves[i]

    def end_leaves(self, i: int) -> Leaves:
        """The embedding's or the final norm's, which stay where the blocks compute."""
        return self._leaves[i]

    def read_target(self, op: Op) -> Tensor:
        """uint8: where a READ puts its block."""
        (slot,) = op.slots
        return self._incoming[slot] if self.plan.staged else self._slots[slot]

    def write_source(self, op: Op) -> Tensor:
        """uint8: what a WRITE takes."""
        (i,), (slot,) = op.blocks, op.slots
        held = self.store.memory_buffer("weights", i)
        return self._slots[slot] if held is None else held

    def load_endpoints(self, op: Op) -> tuple[Tensor, Tensor]:
        """(target on the device, source in memory) of a LOAD."""
        (i,), (slot,) = op.blocks, op.slots
        return self.leaves(i, slot).flat, self.host_weights(i)

    def host_weights(self, i: int) -> Tensor:
        """The streamed form of fragment i's weights in memory: its home, or where a READ put it."""
        held = self.store.memory_buffer("weights", i)
        if held is None:
            held = self._incoming[i % self.plan.host_slots]
        return self._typed(held, self.plan.fragments[i].size)

    # ---- gradients -------------------------------------------------------------------------------------------

    def gradient(self, i: int, slot: int) -> Tensor:
        """fp32 [n], where it is computed."""
        return self._floats(self._gradients[i] if slot < 0 else self._pool[slot], i)

    def host_gradient(self, i: int) -> Tensor:
        """fp32 [n], where an update takes it from under staging."""
        return self._floats(self._host_raw(i), i)

    def spill_source(self, i: int, slot: int) -> Tensor:
        """uint8, whole pages: what a SPILL takes."""
        return self._host_raw(i) if self.plan.staged else self._pool[slot]

    def _host_raw(self, i: int) -> Tensor:
        return (
            self._host_ends[i]
            if i in self._host_ends
            else self._host_gradients[self.plan.host_gradient_slot(i)]
        )

    def _floats(self, raw: Tensor, i: int) -> Tensor:
        return raw[: 4 * self.plan.fragments[i].size].view(torch.float32)

    def tile_scratch(self, k: int) -> Tensor:
        """uint8: a tile's worth of memory for what is done between steps; the last is a tile of moments. Nothing where
        memory holds all."""
        return self._spares[k] if self._spares else torch.empty(0, dtype=torch.uint8)

    def fragment_scratch(self, i: int) -> Tensor:
        """int32 [n] in memory that is free between steps."""
        if self.plan.staged:
            return torch.empty(self.plan.fragments[i].size, dtype=torch.int32)
        return self.gradient(i, -1 if self.plan.own_gradient(i) else 0).view(torch.int32)

    # ---- updates ---------------------------------------------------------------------------------------------

    def ring_parts(self, op: Op) -> dict[str, Tensor]:
        """uint8 by kind: what comes from disk for one tile, one after the other in a buffer of the ring."""
        (i,), plan = op.blocks, self.plan
        begin, end = plan.bounds(i, op.tile)
        wanted = {"moments": plan.record("moments", end - begin)}
        if plan.spilled(i):
            wanted["gradient"] = plan.record("anchor", end - begin)
        if plan.staged and plan.weights[i] == "disk":
            wanted["weights"] = plan.record("weights", end - begin)
        parts, at = {}, 0
        for kind, size in wanted.items():
            parts[kind] = self._ring[op.ring][at : at + size]
            at += size
        return parts

    def update_parts(self, op: Op, t: int) -> tuple[AdamMoments, Tensor, Tensor]:
        """(moments, weights as streamed [n], gradient fp32 [n]) of one tile, wherever they are."""
        (i,), (slot,), (gradient_slot,), plan = op.blocks, op.slots, op.gradients, self.plan
        begin, end = plan.bounds(i, t)
        n = end - begin
        parts = (
            self.ring_parts(op)
            if op.ring >= 0
            else {"moments": self.store.memory_record("moments", i, t)}
        )
        if "weights" in parts:
            weights = self._typed(parts["weights"], n)
        else:
            weights = (self.leaves(i, slot).flat if slot >= 0 else self.host_weights(i))[begin:end]
        if "gradient" in parts:
            gradient = parts["gradient"][: 4 * n].view(torch.float32)
        elif plan.staged and plan.weights[i] != "device":
            gradient = self.host_gradient(i)[begin:end]
        else:
            gradient = self.gradient(i, gradient_slot)[begin:end]
        return AdamMoments.of(plan, parts["moments"], n), weights.detach(), gradient
