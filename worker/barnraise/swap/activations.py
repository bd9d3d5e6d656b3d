"""Activation checkpoints: inputs of blocks that wait for backward, by (block, micro-batch).

The gradient by a block's input waits under another key (`gradient_key`) until the block below it
needs it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from barnraise.planning.program import LaneName
from barnraise.swap.lanes import LaneEvent, WorkerLane

# Copies to host memory that may be under way at a time. The memory model counts the tensors that
# they read, and a thread that launches faster than the device computes waits here.
COPIES_OUT = 2


def gradient_key(i: int) -> int:
    """Return the "block" under which the gradient by fragment i's input is stored, i > 0."""
    return -i


class Activations:
    """Activations that stay where they were computed."""

    def __init__(self) -> None:
        self._stored: dict[tuple[int, int], Tensor] = {}

    @property
    def count(self) -> int:
        """Return the number of activations stored."""
        return len(self._stored)

    def store(self, i: int, m: int, x: Tensor) -> None:
        """Store the input of block i for micro-batch m."""
        self._stored[i, m] = x

    def get(self, i: int, m: int) -> Tensor:
        """Return the input of block i for micro-batch m; it stays stored."""
        return self._stored[i, m]

    def pop(self, i: int, m: int) -> Tensor:
        """Return the input of block i for micro-batch m, and remove it."""
        return self._stored.pop((i, m))

    def finish(self) -> None:
        """End a step: nothing is stored now."""


class HostActivations(Activations):
    """Activations that wait in host memory.

    They are copied out alongside the kernels, and copied back one micro-batch before they are
    needed. The one stored last stays on the device as well until the next is stored, because the
    next group often needs it at once.
    """

    def __init__(self, lanes: Mapping[LaneName, WorkerLane], pool: list[Tensor]) -> None:
        """Copy on `lanes` into `pool`: fp32 host buffers, each as large as an activation."""
        super().__init__()
        self._lanes, self._pool = lanes, pool
        self._free = list(range(len(pool)))
        # For each buffer of the pool, the last copy from or to it.
        self._last_copy: list[LaneEvent | None] = [None] * len(pool)
        self._places: dict[tuple[int, int], tuple[int, torch.Size]] = {}
        self._latest: tuple[tuple[int, int], Tensor] | None = None
        self._copies_out: list[tuple[LaneEvent, Tensor]] = []  # references until the copy has ended
        self._copies_in: dict[tuple[int, int], tuple[LaneEvent, Tensor]] = {}

    @property
    def count(self) -> int:
        """Return the number of activations stored."""
        return len(self._pool) - len(self._free)

    def store(self, i: int, m: int, x: Tensor) -> None:
        """Begin to copy the input of block i for micro-batch m to host memory."""
        self._limit_copies_out()
        place = self._free.pop()
        self._places[i, m] = place, x.shape
        target = self._pool[place][: x.numel()].view(x.shape)
        event = self._lanes[LaneName.OUT].submit(
            lambda: target.copy_(x, non_blocking=True),
            [self._lanes[LaneName.COMPUTE].record_event(), *self._copies_before(place)],
            f"boundary {i}",
        )
        self._last_copy[place] = event
        self._copies_out.append((event, x))
        self._latest = (i, m), x

    def get(self, i: int, m: int) -> Tensor:
        """Return the input of block i for micro-batch m, and begin to copy the next one back."""
        if self._latest is not None and self._latest[0] == (i, m):
            return self._latest[1]
        event, x = self._copies_in.pop((i, m), None) or self._copy_in(i, m)
        if (i, m + 1) in self._places and not self._is_on_device(i, m + 1):
            self._copies_in[i, m + 1] = self._copy_in(i, m + 1)
        event.wait(self._lanes[LaneName.COMPUTE].stream)
        return x

    def pop(self, i: int, m: int) -> Tensor:
        """Return the input of block i for micro-batch m, and free its buffer."""
        x = self.get(i, m)
        place, _ = self._places.pop((i, m))
        self._copies_in.pop((i, m), None)
        self._free.append(place)
        return x

    def finish(self) -> None:
        """End a step: wait until no copy uses memory that is about to be freed."""
        for event, _ in self._copies_out:
            event.wait()
        self._copies_out.clear()
        for event, _ in self._copies_in.values():  # an interrupted step has not used them
            event.wait()
        self._copies_in.clear()

    def _is_on_device(self, i: int, m: int) -> bool:
        """Return whether a tensor is on the device or on its way there.

        A copy that nobody uses would be freed while it is still written to.
        """
        is_latest = self._latest is not None and self._latest[0] == (i, m)
        return is_latest or (i, m) in self._copies_in

    def _limit_copies_out(self) -> None:
        """Free the tensors whose copies have ended, and wait until few are under way."""
        self._copies_out = [copy for copy in self._copies_out if not copy[0].is_finished]
        while len(self._copies_out) > COPIES_OUT:
            self._copies_out[0][0].wait()  # before the tensor is released, by this thread
            del self._copies_out[0]

    def _copy_in(self, i: int, m: int) -> tuple[LaneEvent, Tensor]:
        self._limit_copies_out()
        place, shape = self._places[i, m]
        source = self._pool[place][: shape.numel()].view(shape)
        stream = self._lanes[LaneName.COMPUTE].stream
        x = torch.empty(shape, device="cpu" if stream is None else stream.device)
        event = self._lanes[LaneName.IN].submit(
            lambda: x.copy_(source, non_blocking=True),
            # The compute lane may still use the memory that the allocator has given to x.
            [self._lanes[LaneName.COMPUTE].record_event(), *self._copies_before(place)],
            f"boundary {i}",
        )
        self._last_copy[place] = event
        return event, x

    def _copies_before(self, place: int) -> list[LaneEvent]:
        event = self._last_copy[place]
        return [] if event is None else [event]
