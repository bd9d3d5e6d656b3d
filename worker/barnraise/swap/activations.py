"""Where the inputs of blocks wait for backward, and streams between groups: by (block, micro-batch)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from barnraise.planning.program import Lane as Name
from barnraise.swap.lanes import LaneEvent, WorkerLane


class Activations:
    """They wait where they were computed."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Tensor] = {}

    def store(self, i: int, m: int, x: Tensor) -> None:
        self._kept[i, m] = x

    def get(self, i: int, m: int) -> Tensor:
        return self._kept[i, m]

    def pop(self, i: int, m: int) -> Tensor:
        return self._kept.pop((i, m))


class HostActivations(Activations):
    """They wait in RAM: copied out beside the kernels, and back one ahead of when they are wanted.

    `pool`: fp32 buffers in RAM, each at least as large as a stream. What was put last stays on the device as well until
    the next is put, as the next group often wants it at once.
    """

    def __init__(self, lanes: Mapping[str, WorkerLane], pool: list[Tensor]):
        super().__init__()
        self._lanes, self._pool = lanes, pool
        self._free = list(range(len(pool)))
        self._busy: list[LaneEvent | None] = [None] * len(pool)  # the last copy from or to each
        self._places: dict[tuple[int, int], tuple[int, torch.Size]] = {}
        self._latest: tuple[tuple[int, int], Tensor] | None = None
        self._leaving: list[tuple[LaneEvent, Tensor]] = []  # not to be freed before they are out
        self._coming: dict[tuple[int, int], tuple[LaneEvent, Tensor]] = {}

    def store(self, i: int, m: int, x: Tensor) -> None:
        self._leaving = [(event, kept) for event, kept in self._leaving if not event.is_finished]
        place = self._free.pop()
        self._places[i, m] = place, x.shape
        target = self._pool[place][: x.numel()].view(x.shape)
        after = [self._lanes[Name.COMPUTE].record_event(), *self._before(place)]
        event = self._lanes[Name.OUT].submit(
            lambda: target.copy_(x, non_blocking=True), after, f"boundary {i}"
        )
        self._busy[place] = event
        self._leaving.append((event, x))
        self._latest = (i, m), x

    def get(self, i: int, m: int) -> Tensor:
        if self._latest is not None and self._latest[0] == (i, m):
            return self._latest[1]
        event, x = self._coming.pop((i, m), None) or self._come(i, m)
        if (i, m + 1) in self._places and (i, m + 1) not in self._coming:
            self._coming[i, m + 1] = self._come(i, m + 1)
        event.wait(self._lanes[Name.COMPUTE].stream)
        return x

    def pop(self, i: int, m: int) -> Tensor:
        x = self.get(i, m)
        place, _ = self._places.pop((i, m))
        self._coming.pop((i, m), None)
        self._free.append(place)
        return x

    def _come(self, i: int, m: int) -> tuple[LaneEvent, Tensor]:
        place, shape = self._places[i, m]
        source = self._pool[place][: shape.numel()].view(shape)
        device = (
            self._lanes[Name.COMPUTE].stream.device if self._lanes[Name.COMPUTE].stream else "cpu"
        )
        x = torch.empty(shape, device=device)
        after = [
            self._lanes[Name.COMPUTE].record_event(),
            *self._before(place),
        ]  # its memory may have been another's just now
        event = self._lanes[Name.IN].submit(
            lambda: x.copy_(source, non_blocking=True), after, f"boundary {i}"
        )
        self._busy[place] = event
        return event, x

    def _before(self, place: int) -> list[LaneEvent]:
        event = self._busy[place]
        return [] if event is None else [event]
