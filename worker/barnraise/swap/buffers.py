"""The static buffers of a plan's operations: slots for weights, gradients, and the ring."""

import torch
from torch import Tensor

from barnraise.planning import memory_model
from barnraise.planning.plan import Plan
from barnraise.planning.program import ADDED_SLOTS, Operation
from barnraise.swap.arena import Arena
from barnraise.swap.device_buffers import DeviceBuffers
from barnraise.swap.muon_moments import view_moments
from barnraise.swap.state_store import StateStore
from barnraise.swap.tiles import Tile


class Buffers(DeviceBuffers):
    """Find the buffer of each operation: of the first device, and of memory, which all share.

    Attributes:
        others: the buffers of the other devices.
        host_scalars: host copies of norms and losses, fp64, if updates read them during a step.
    """

    def __init__(self, plan: Plan, store: StateStore) -> None:
        """Allocate all buffers of a plan.

        Raises:
            StateError: memory does not suffice; the message names what is missing.
        """
        first, *others = plan.device_plans
        super().__init__(first, store, store.device if plan.staged else store.host)
        self._plan = plan
        self.others = [
            DeviceBuffers(each, store, Arena(torch.device(each.device))) for each in others
        ]
        self._allocate_staging()

        # The sum of each device's losses comes after the norm of each fragment.
        self.host_scalars: Tensor | None = None
        if memory_model.copies_norms(plan):
            size = 8 * (len(plan.fragments) + 1 + len(others))
            self.host_scalars = store.host.allocate(size, True)[:size].view(torch.float64)
        store.host.warn_if_unpinned()

    def _allocate_staging(self) -> None:
        """Allocate host memory for gradients, weights and tiles that pass between tiers."""
        plan, host = self._plan, self._store.host
        block = plan.fragments[1]
        # For each device but the first: two blocks' gradients, then those of the ends.
        self._added = [
            [
                host.allocate(4 * plan.fragments[i].size, True)
                for i in (*[1] * ADDED_SLOTS, 0, plan.last_fragment)
            ]
            for _ in self.others
        ]
        self._host_gradients = [
            host.allocate(4 * block.size, True) for _ in range(plan.host_gradient_buffers)
        ]
        self._host_end_gradients = {
            i: host.allocate(4 * plan.fragments[i].size, True)
            for i in plan.ends
            if plan.moves_gradient(i)
        }
        reads_blocks = plan.staged and "disk" in plan.weights
        read_slots = plan.host_slots if reads_blocks else 0
        record_bytes = plan.record_bytes("weights", block.size)
        self._read_slots = [host.allocate(record_bytes, True) for _ in range(read_slots)]
        uses_ring = any(map(plan.uses_ring, plan.local_fragments))
        ring = plan.ring if uses_ring else 0
        crosses_link = any(map(plan.trains_matrices, plan.blocks))
        self._ring = [host.allocate(plan.ring_bytes(), crosses_link) for _ in range(ring)]

    def close(self) -> None:
        """Free the memory. What other objects still refer to the buffers cannot keep it alive."""
        super().close()
        for device in self.others:
            device.close()
        for buffers in (self._read_slots, self._ring, self._host_gradients):
            buffers.clear()
        self.others.clear()
        self._added.clear()
        self._host_end_gradients.clear()
        self.host_scalars = None

    def on(self, device: int) -> DeviceBuffers:
        """Return the buffers of a device by its number."""
        return self.others[device - 1] if device else self

    # ---- weights -------------------------------------------------------------------------------

    def read_target(self, op: Operation) -> Tensor:
        """Return the buffer, uint8, that a READ fills."""
        (slot,) = op.slots
        return self._read_slots[slot] if self._plan.staged else self._slots[slot]

    def write_source(self, op: Operation) -> Tensor:
        """Return the buffer, uint8, that a WRITE writes to disk."""
        (i,), (slot,) = op.blocks, op.slots
        raw = self._store.memory_buffer("weights", i)
        return self._slots[slot] if raw is None else raw

    def load_endpoints(self, op: Operation) -> tuple[Tensor, Tensor]:
        """Return (target on the device, source in host memory) of a LOAD."""
        (i,), (slot,) = op.blocks, op.slots
        return self.on(op.device).leaves(i, slot).flat, self.host_weights(i)

    def host_weights(self, i: int) -> Tensor:
        """Return fragment i's streamed weights in host memory: at home, or from a READ."""
        raw = self._store.memory_buffer("weights", i)
        if raw is None:
            raw = self._read_slots[i % self._plan.host_slots]
        return self._view_streamed(raw, self._plan.fragments[i].size)

    # ---- gradients -----------------------------------------------------------------------------

    def host_gradient(self, i: int) -> Tensor:
        """Return fragment i's gradient, fp32 [n], in host memory, for a staged update."""
        return self._view_floats(self._host_gradient_buffer(i), i)

    def offload_target(self, i: int, device: int) -> Tensor:
        """Return the buffer, fp32 [n], to which a device's gradient of fragment i goes."""
        if device == 0:
            return self.host_gradient(i)
        ends = {0: ADDED_SLOTS, self._plan.last_fragment: ADDED_SLOTS + 1}
        return self._view_floats(self._added[device - 1][ends.get(i, i % ADDED_SLOTS)], i)

    def spill_source(self, i: int, slot: int) -> Tensor:
        """Return the buffer, uint8 of whole pages, that a SPILL writes to disk."""
        return self._host_gradient_buffer(i) if self._plan.staged else self._pool[slot]

    def _host_gradient_buffer(self, i: int) -> Tensor:
        if i in self._host_end_gradients:
            return self._host_end_gradients[i]
        return self._host_gradients[self._plan.host_gradient_slot(i)]

    # ---- scratch -------------------------------------------------------------------------------

    def fragment_scratch(self, i: int) -> Tensor:
        """Return an int32 [n] buffer for fragment i in memory that is free between steps."""
        if self._plan.staged:
            return torch.empty(self._plan.fragments[i].size, dtype=torch.int32)
        return self.gradient(i, -1 if self._plan.has_gradient_buffer(i) else 0).view(torch.int32)

    # ---- updates -------------------------------------------------------------------------------

    def ring_parts(self, op: Operation) -> dict[str, Tensor]:
        """Return the parts (uint8) of a ring buffer, by the kind of state that lies in them."""
        (i,), plan = op.blocks, self._plan
        begin, end = plan.tile_bounds(i, op.tile)
        sizes = {"moments": plan.tile_record_bytes("moments", i)[op.tile]}
        if plan.spills_gradient(i):
            sizes["gradient"] = plan.record_bytes("anchor", end - begin)
        if plan.staged and plan.weights[i] == "disk":
            sizes["weights"] = plan.record_bytes("weights", end - begin)
        parts: dict[str, Tensor] = {}
        offset = 0
        for kind, size in sizes.items():
            parts[kind] = self._ring[op.ring_slot][offset : offset + size]
            offset += size
        return parts

    def update_parts(self, op: Operation, t: int) -> tuple[Tile, Tensor]:
        """Return tile t of an UPDATE and its gradient, fp32 [n], wherever they lie."""
        (i,), (slot,), (gradient_slot,) = op.blocks, op.slots, op.gradients
        plan = self._plan
        begin, end = plan.tile_bounds(i, t)
        n = end - begin
        if op.ring_slot >= 0:
            parts = self.ring_parts(op)
        else:
            parts = {"moments": self._store.memory_record("moments", i, t)}
        if "weights" in parts:
            weights = self._view_streamed(parts["weights"], n)
        elif slot >= 0:
            weights = self.leaves(i, slot).flat[begin:end]
        else:
            weights = self.host_weights(i)[begin:end]
        if "gradient" in parts:
            gradient = parts["gradient"][: 4 * n].view(torch.float32)
        elif plan.moves_gradient(i):
            gradient = self.host_gradient(i)[begin:end]
        else:
            gradient = self.gradient(i, gradient_slot)[begin:end]
        moments = view_moments(plan, i, t, parts["moments"])
        return Tile(i, t, begin, moments, weights.detach()), gradient


class HostBuffers(Buffers):
    """The buffers where ranks compute, which have their own: for fragments between steps."""

    def __init__(self, plan: Plan) -> None:
        """Allocate nothing."""
        self._plan = plan

    def fragment_scratch(self, i: int) -> Tensor:
        """Return an int32 [n] buffer for fragment i."""
        return torch.empty(self._plan.fragments[i].size, dtype=torch.int32)

    def close(self) -> None:
        """Do nothing: there is no memory to free."""
