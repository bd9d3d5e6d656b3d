"""Activations by (block, micro-batch): inputs that wait for backward, and what passes on at once.

The gradient by a block's input passes on under another key (`gradient_key`) than the input itself.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from barnraise.planning.memory_model import COPIES_OUT
from barnraise.planning.plan import Plan
from barnraise.planning.program import LaneName
from barnraise.swap.lanes import LaneEvent, WorkerLane

Key = tuple[int, int]  # a block and a micro-batch


def gradient_key(i: int) -> int:
    """Return the "block" under which the gradient by fragment i's input passes on, i > 0."""
    return -i


class Activations:
    """Activations that stay where they were computed."""

    def __init__(self) -> None:
        self._stored: dict[Key, Tensor] = {}
        self._passing: dict[Key, Tensor] = {}

    @property
    def count(self) -> int:
        """Return the number of activations stored."""
        return len(self._stored)

    def send(self, i: int, m: int, x: Tensor) -> None:
        """Pass on what the group of block i needs next; it stays where it is computed."""
        self._passing[i, m] = x

    def receive(self, i: int, m: int) -> Tensor:
        """Return what the group below or above has passed on to the group of block i."""
        return self._passing.pop((i, m))

    def store(self, i: int, m: int, x: Tensor) -> None:
        """Store the input of block i for micro-batch m."""
        self._stored[i, m] = x

    def pop(self, i: int, m: int) -> Tensor:
        """Return the input of block i for micro-batch m, and remove it."""
        return self._stored.pop((i, m))

    def prefetch(self) -> None:
        """Prepare for `pop`: nothing more is stored in this step."""

    def finish(self) -> None:
        """End a step: nothing is stored now."""


class HostActivations(Activations):
    """Activations that wait in host memory if they are inputs of lower blocks.

    Those are copied out alongside the kernels. Backward needs them in an order that the plan tells,
    and each is copied back while the micro-batch before it is computed. So the first ones of a
    group come while the group above is computed, and the very first ones during the head.
    """

    def __init__(
        self, plan: Plan, lanes: Mapping[LaneName, WorkerLane], pool: list[Tensor]
    ) -> None:
        """Copy on `lanes` into `pool`: fp32 host buffers, each as large as an activation."""
        super().__init__()
        self._lanes, self._pool = lanes, pool
        self._free = list(range(len(pool)))
        waiting = self._waiting = set(plan.inputs_in_ram)
        micro_batches = range(plan.micro_batches)
        groups = [[i for i in group if i in waiting] for group in plan.backward_groups]
        self._order = [(i, m) for group in groups for m in micro_batches for i in group]
        self._ahead = max(map(len, groups), default=0)  # how many are copied back ahead
        self._copied = self._popped = 0  # positions in the order
        # For each buffer of the pool, the last copy from or to it.
        self._last_copy: list[LaneEvent | None] = [None] * len(pool)
        self._places: dict[Key, tuple[int, torch.Size]] = {}
        self._copies_out: list[tuple[LaneEvent, Tensor]] = []  # references until the copy has ended
        self._copies_in: dict[Key, tuple[LaneEvent, Tensor]] = {}

    @property
    def count(self) -> int:
        """Return the number of activations stored."""
        return len(self._stored) + len(self._pool) - len(self._free)

    def store(self, i: int, m: int, x: Tensor) -> None:
        """Store the input of block i for micro-batch m, or begin to copy it to host memory."""
        if i not in self._waiting:
            super().store(i, m, x)
            return
        self._limit_copies_out(COPIES_OUT)
        place = self._free.pop()
        self._places[i, m] = place, x.shape
        target = self._pool[place][: x.numel()].view(x.shape)
        event = self._lanes[LaneName.OUT].submit(
            lambda: target.copy_(x, non_blocking=True),
            [self._lanes[LaneName.COMPUTE].record_event(), *self._copies_before(place)],
            f"input {i}",
        )
        self._last_copy[place] = event
        self._copies_out.append((event, x))

    def prefetch(self) -> None:
        """Begin to copy back what backward needs first, once nothing is copied out."""
        self._limit_copies_out(0)
        # A machine of a crew may have fewer micro-batches than were planned.
        self._order = [key for key in self._order if key in self._places]
        self._copy_in_until(self._ahead)

    def pop(self, i: int, m: int) -> Tensor:
        """Return the input of block i for micro-batch m, and begin to copy back what follows."""
        if i not in self._waiting:
            return super().pop(i, m)
        assert self._order[self._popped] == (i, m), "backward follows the plan's order"
        self._popped += 1
        self._copy_in_until(self._popped + self._ahead)
        event, x = self._copies_in.pop((i, m))
        place, _ = self._places.pop((i, m))
        self._free.append(place)
        event.wait(self._lanes[LaneName.COMPUTE].stream)
        return x

    def finish(self) -> None:
        """End a step: wait until no copy uses memory that is about to be freed."""
        self._limit_copies_out(0)
        for event, _ in self._copies_in.values():  # an interrupted step has not used them
            event.wait()
        self._copies_in.clear()

    def _limit_copies_out(self, most: int) -> None:
        """Free the tensors whose copies have ended, and wait until at most so many are under way.

        A thread that launches faster than the device computes waits here.
        """
        self._copies_out = [copy for copy in self._copies_out if not copy[0].is_finished]
        while len(self._copies_out) > most:
            self._copies_out[0][0].wait()  # before the tensor is released, by this thread
            del self._copies_out[0]

    def _copy_in_until(self, end: int) -> None:
        """Begin to copy back the activations before a position in backward's order."""
        for key in self._order[self._copied : end]:
            self._copies_in[key] = self._copy_in(*key)
            self._copied += 1

    def _copy_in(self, i: int, m: int) -> tuple[LaneEvent, Tensor]:
        place, shape = self._places[i, m]
        source = self._pool[place][: shape.numel()].view(shape)
        stream = self._lanes[LaneName.COMPUTE].stream
        x = torch.empty(shape, device="cpu" if stream is None else stream.device)
        event = self._lanes[LaneName.IN].submit(
            lambda: x.copy_(source, non_blocking=True),
            # The compute lane may still use the memory that the allocator has given to x.
            [self._lanes[LaneName.COMPUTE].record_event(), *self._copies_before(place)],
            f"input {i}",
        )
        self._last_copy[place] = event
        return event, x

    def _copies_before(self, place: int) -> list[LaneEvent]:
        event = self._last_copy[place]
        return [] if event is None else [event]
