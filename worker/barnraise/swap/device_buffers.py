"""The buffers that one device computes with: slots for weights, gradients, and activations."""

import torch
from torch import Tensor

from barnraise.models.weights import views
from barnraise.planning.plan import Plan
from barnraise.swap.arena import Arena
from barnraise.swap.leaves import Leaves
from barnraise.swap.state_store import StateStore
from barnraise.swap.tiles import streamed_dtype


class DeviceBuffers:
    """The buffers of one device; without a device of their own they are in RAM.

    Attributes:
        arena: where the buffers lie.
        head_gradient: the head's gradient of its table, fp32 [vocabulary, width]. That of a tied
            table is added to the embedding's; another is a part of the last fragment's. Empty on
            a machine without the head.
        streams: host buffers for activations, fp32, if they wait in host memory.
    """

    def __init__(self, plan: Plan, store: StateStore, arena: Arena) -> None:
        """Allocate what a device needs for its own micro-batches, which `plan` counts.

        Raises:
            StateError: memory does not suffice; the message names what is missing.
        """
        self._plan, self._store, self.arena = plan, store, arena
        self._dtype = streamed_dtype(plan)
        self._allocate_weights(arena)
        self._allocate_gradients(arena)
        waiting = len(plan.inputs_in_ram) * plan.micro_batches
        stream = plan.sequences * plan.model.context * plan.model.width
        self.streams = [store.host.allocate_floats(stream, True) for _ in range(waiting)]

    def _allocate_weights(self, compute: Arena) -> None:
        """Allocate the slots of paged blocks, and copies of other fragments to compute with."""
        plan, block = self._plan, self._plan.fragments[1]
        record_bytes = plan.record_bytes("weights", block.size)
        self._slots = [compute.allocate(record_bytes) for _ in range(plan.slots)]
        self._slot_leaves = [
            Leaves(block, self._view_streamed(raw, block.size)) for raw in self._slots
        ]
        self._leaves: dict[int, Leaves] = {}
        for fragment in plan.fragments:
            i = fragment.index
            raw = self._store.memory_buffer("weights", i)
            if raw is not None and (not plan.staged or plan.weights[i] == "device"):
                self._leaves[i] = Leaves(fragment, self._view_streamed(raw, fragment.size))
            elif i in plan.ends:
                raw = compute.allocate(plan.record_bytes("weights", fragment.size))
                self._leaves[i] = Leaves(fragment, self._view_streamed(raw, fragment.size))

    def _allocate_gradients(self, compute: Arena) -> None:
        """Allocate the pool of gradients, and gradients of fragments that have one of their own."""
        plan, block = self._plan, self._plan.fragments[1]
        pooled = any(not plan.has_gradient_buffer(i) for i in plan.blocks)
        pool_size = plan.gradient_slots if pooled else 0
        self._pool = [compute.allocate(4 * block.size) for _ in range(pool_size)]
        self._gradients = {
            i: compute.allocate(4 * plan.fragments[i].size)
            for i in plan.local_fragments
            if plan.has_gradient_buffer(i)
        }
        self.head_gradient = torch.empty(0)
        if not plan.ends:
            return
        table = (plan.model.vocabulary, plan.model.width)
        if plan.model.tied_head:
            self.head_gradient = compute.allocate_floats(table[0] * table[1]).view(table)
        else:
            final = self.gradient(plan.last_fragment, -1)
            self.head_gradient = views(plan.fragments[-1], final)["head"]

    def close(self) -> None:
        """Free the memory. What other objects still refer to the buffers cannot keep it alive."""
        for leaves in (*self._slot_leaves, *self._leaves.values()):
            leaves.close()
        for buffers in (self._slots, self._slot_leaves, self._pool, self.streams):
            buffers.clear()
        for by_fragment in (self._leaves, self._gradients):
            by_fragment.clear()
        self.head_gradient = torch.empty(0)

    def _view_streamed(self, raw: Tensor, n: int) -> Tensor:
        """View the first n elements of a uint8 buffer in the streamed type."""
        return raw[: n * self._dtype.itemsize].view(self._dtype)

    def leaves(self, i: int, slot: int) -> Leaves:
        """Return the leaves that fragment i is computed with: a slot's, or for -1 its own."""
        return self._slot_leaves[slot] if slot >= 0 else self._leaves[i]

    def gradient(self, i: int, slot: int) -> Tensor:
        """Return fragment i's gradient, fp32 [n], where it is computed."""
        return self._view_floats(self._gradients[i] if slot < 0 else self._pool[slot], i)

    def _view_floats(self, raw: Tensor, i: int) -> Tensor:
        return raw[: 4 * self._plan.fragments[i].size].view(torch.float32)
