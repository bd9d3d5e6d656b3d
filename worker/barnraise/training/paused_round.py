"""The state of a worker that gave its memory back in the middle of a round.

A checkpoint holds the state between two rounds. This one holds every byte of the engine's memory,
so that the round goes on as if nothing had been: also after a restart, if the plan is the same.
"""

import json
import shutil
from pathlib import Path

import torch

from barnraise.planning.plan import STATE_KINDS, Plan
from barnraise.swap.state_store import StateStore
from barnraise.training.checkpoint import CheckpointSlots, StateHeader

LAYOUT = "layout"  # the tensor that describes in which plan's layout the others are
SPARE_SHARE = 1.1  # of the state's size that must be free on the disk


class PausedRound:
    """The saved memory of a plan without state on disk, in `paused_round/` of a run's folder."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        """Find what was saved under this plan."""
        self._plan = plan
        self._slots = CheckpointSlots(folder / "paused_round")
        has_memory = not plan.on_disk and not plan.ranks
        header = self._slots.header if has_memory else None
        self.header = header if header is not None and self._has_layout_of(plan) else None

    def _has_layout_of(self, plan: Plan) -> bool:
        saved = self._slots.load()
        if saved is None or LAYOUT not in saved[0]:
            return False
        return torch.equal(saved[0][LAYOUT], _describe_layout(plan))

    def has_room(self) -> bool:
        """Return whether the disk has room for the state; what ranks share is not saved there."""
        plan = self._plan
        if plan.ranks:
            return False
        size = sum(plan.total_bytes(kind, i) for kind, i in _records(plan))
        return shutil.disk_usage(self._slots.folder.parent).free > SPARE_SHARE * size

    def save(self, store: StateStore, header: StateHeader) -> None:
        """Make all of a store's memory durable, after `apply_queued`: nothing works on it."""
        tensors = {LAYOUT: _describe_layout(self._plan)}
        for kind, i in _records(self._plan):
            buffer = store.memory_buffer(kind, i)
            assert buffer is not None, "a plan without state on disk has all of it in memory"
            tensors[f"{kind}.{i}"] = buffer.cpu()
        self._slots.clear()
        self.header = self._slots.save(tensors, header)

    def fill(self, store: StateStore) -> None:
        """Copy what was saved into a new store of the same plan."""
        saved = self._slots.load()
        assert saved is not None, "the header was read from it"
        for kind, i in _records(self._plan):
            buffer = store.memory_buffer(kind, i)
            assert buffer is not None
            buffer.copy_(saved[0][f"{kind}.{i}"])

    def remove(self) -> None:
        """Remove what was saved: the round it belongs to is published, or cannot go on."""
        self.header = None
        self._slots.clear()


def _records(plan: Plan) -> list[tuple[str, int]]:
    return [(kind, i) for kind in STATE_KINDS for i in plan.local_fragments]


def _describe_layout(plan: Plan) -> torch.Tensor:
    """Return what decides how the bytes of a fragment are arranged, as uint8."""
    layout = StateStore.layout_of(plan) | {
        "sizes": [plan.total_bytes(kind, i) for kind, i in _records(plan)]
    }
    return torch.frombuffer(bytearray(json.dumps(layout).encode()), dtype=torch.uint8)
