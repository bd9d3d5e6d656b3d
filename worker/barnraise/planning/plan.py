"""What static analysis decides for one machine: what lies where, what moves when, and how long a step will take. Pure.

`Plan` is the decision: the engine and its schedule obey it. `make_plan` searches for it; it is found before anything is
allocated, and what does not fit is refused with the nearest things that would.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property

from barnraise.spec import Fragment, ModelSpec

PAGE = 4096
TILE_GRAIN = 2048  # elements: tiles begin on whole pages in every precision, and on whole blocks of 8-bit moments
STATE_KINDS = ("weights", "moments", "anchor", "momentum", "feedback")  # of state, as they are kept


def round_to_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


@dataclass(frozen=True)
class Plan:
    """How one machine trains one model. Fragments by index: 0 the embedding, then the blocks, last the final norm.

    Tiers: "device" (a GPU's memory), "host" (RAM), "disk". Without a GPU the RAM is where the layers compute, unless
    `staged`, when they are copied to buffers of their own as they would be to a GPU.
    """

    model: ModelSpec
    device: str = "cpu"  # "cpu" or "cuda"
    threads: int = 2  # of the CPU
    dtype: str = "float32"  # what is streamed and multiplied: "bfloat16" splits the master copy
    staged: bool = False  # the device has memory of its own
    sequences: int = 1  # of a micro-batch
    micro_batches: int = 1  # of a step, M
    forward_groups: tuple[
        tuple[int, ...], ...
    ] = ()  # blocks computed before the next are touched, bottom up
    backward_groups: tuple[tuple[int, ...], ...] = ()  # top down, each ascending within
    retained_blocks: int = (
        0  # so many of the top blocks keep what backward needs; the others compute it again
    )
    kept_inputs: str = "block"  # what is kept of a forward: the inputs of each "block", or of each backward "group"
    boundaries: str = "device"  # where kept inputs wait: where they are computed, or on the "host"
    weights: tuple[str, ...] = ()  # tier of each fragment's master copy
    moments: tuple[str, ...] = ()
    gradients: str = (
        "host"  # where gradients wait for exact clipping: "host" or, with moments on disk, "disk"
    )
    exchange: str = "host"  # anchor, outer momentum, error feedback
    moments_bits: int = 32
    clipping: str = "exact"
    crash_safety: str = (
        "round"  # "exact" and "restart": the state is on disk; "round": a checkpoint once a round
    )
    slots: int = 0  # buffers that blocks without one of their own are paged through
    host_slots: int = 2  # between disk and device
    gradient_slots: int = 2  # for blocks whose gradients do not wait where they are computed
    host_gradient_slots: int = 2  # for what comes from a device
    ring: int = 4  # tiles under way between disk and optimizer
    tile: int = 0  # elements
    # what was predicted
    step_seconds: float = 0.0  # of a step
    bottleneck: str = ""  # the resource that takes longest: "compute", "disk", "link", "optimizer"
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    written_per_step: int = 0  # bytes to disk
    written_per_day: int = 0

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        return _fragments(self.model)

    @property
    def blocks(self) -> range:
        return range(1, self.model.layers + 1)

    @property
    def last_fragment(self) -> int:
        return self.model.layers + 1

    @property
    def on_disk(self) -> bool:
        """Whether the state's home is the disk: memory then holds some of it as well, and never alone."""
        return self.crash_safety != "round"

    @property
    def commits_steps(self) -> bool:
        return self.crash_safety == "exact"

    # ---- what the schedule asks ------------------------------------------------------------------------------

    def update_order(self) -> list[int]:
        """Who is needed first by the next forward comes first."""
        return [0, self.last_fragment, *self.blocks]

    def spills_gradient(self, i: int) -> bool:
        """Whether fragment i's gradient waits on disk."""
        waits = self.clipping == "exact" and self.gradients == "disk" and i in self.blocks
        return waits and self.moments[i] == "disk"

    def has_gradient_buffer(self, i: int) -> bool:
        """Whether fragment i's gradient has a buffer of its own where it is computed: the ends, and all that wait."""
        if i not in self.blocks:
            return True
        waits_here = not self.staged or self.weights[i] == "device"
        return self.clipping == "exact" and waits_here and not self.spills_gradient(i)

    @property
    def defers_updates(self) -> bool:
        """Whether the updates of a step are made during the next one's forward: exact clipping waits for the last
        gradient, and there is something to hide the updates under."""
        return self.clipping == "exact" and (self.staged or self.on_disk)

    def host_gradient_slot(self, i: int) -> int:
        """Which buffer in memory takes a block's gradient from the device."""
        return i % self.host_gradient_slots

    def validate(self) -> None:
        """What the schedule takes for granted and the planner sees to."""
        ends, moved = (
            (self.weights[0], self.weights[-1]),
            [i for i in self.blocks if self.weights[i] != "device"],
        )
        assert "disk" not in ends, (
            "the ends' weights are used all the time: they cannot lie on disk"
        )
        paged = [
            i for i in self.blocks if self.weights[i] == "disk" or (self.staged and i in moved)
        ]
        for group in (*self.forward_groups, *self.backward_groups):
            needed = len(set(group).intersection(paged))
            assert needed <= self.slots, (
                f"{self.slots} slots cannot hold the {needed} blocks of a group"
            )
        for group in self.backward_groups:
            pooled = sum(not self.has_gradient_buffer(i) for i in group)
            assert pooled <= self.gradient_slots, (
                f"{self.gradient_slots} gradient slots are too few for {pooled} blocks"
            )
        if not self.staged:
            return
        for i in moved:
            apart = (
                "moments of weights that come from disk to a device pass through the ring with them"
            )
            assert self.weights[i] != "disk" or self.moments[i] == "disk", apart
        together = [tuple(moved)] if self.clipping == "exact" else self.backward_groups
        for group in together:  # gradients that wait in memory at the same time
            slots = [self.host_gradient_slot(i) for i in group if i in moved]
            waiting = [
                self.host_gradient_slot(i)
                for i in group
                if i in moved and not self.spills_gradient(i)
            ]
            shared = any(slots.count(slot) > 1 for slot in waiting)
            assert not shared, (
                f"{self.host_gradient_slots} gradient slots in memory are too few for what waits there"
            )

    def uses_ring(self, i: int) -> bool:
        return self.moments[i] == "disk"

    def tile_count(self, i: int) -> int:
        return -(-self.fragments[i].size // self.tile)

    def tile_bounds(self, i: int, t: int) -> tuple[int, int]:
        """[begin, end) of tile t, in elements."""
        return t * self.tile, min((t + 1) * self.tile, self.fragments[i].size)

    def writes_weights(self, i: int) -> bool:
        return self.commits_steps or (self.on_disk and self.weights[i] == "disk")

    def writes_moments(self, i: int) -> bool:
        return self.commits_steps or (self.on_disk and self.moments[i] == "disk")

    # ---- sizes -----------------------------------------------------------------------------------------------

    @property
    def streamed_bytes(self) -> int:
        """Of one weight as it is streamed."""
        return 2 if self.dtype == "bfloat16" else 4

    def record_bytes(self, kind: str, elements: int) -> int:
        """Bytes of one tile's record: whole pages."""
        if kind == "weights":
            return round_to_pages(self.streamed_bytes * elements)
        if kind != "moments":
            return round_to_pages(4 * elements)
        return sum(moments_part_bytes(elements, self.moments_bits, self.dtype))

    def tile_record_bytes(self, kind: str, i: int) -> list[int]:
        """Bytes of each tile's record of fragment i."""
        size = self.fragments[i].size
        whole, rest = divmod(size, self.tile)
        return [self.record_bytes(kind, self.tile)] * whole + (
            [self.record_bytes(kind, rest)] if rest else []
        )

    def total_bytes(self, kind: str, i: int) -> int:
        """Bytes of all of them."""
        return self._totals[kind][0 if i == 0 else 2 if i == self.last_fragment else 1]

    @cached_property
    def _totals(self) -> dict[str, list[int]]:
        """By kind: of the embedding, of a block (all are alike), of the final norm."""
        return {
            kind: [sum(self.tile_record_bytes(kind, i)) for i in (0, 1, self.last_fragment)]
            for kind in STATE_KINDS
        }

    def ring_bytes(self) -> int:
        """Of one buffer of the ring: what an update needs of a tile and memory does not hold."""
        size = self.record_bytes("moments", self.tile)
        if any(self.spills_gradient(i) for i in self.blocks):
            size += round_to_pages(4 * self.tile)
        if self.staged and "disk" in self.weights:
            size += self.record_bytes("weights", self.tile)
        return size

    def file_bytes(self) -> int:
        """Of the state on disk: two of each record, or of the anchor alone; and gradients that wait there."""
        if not self.on_disk:
            return 0
        size = 0
        for kind in STATE_KINDS:
            slots = 2 if self.has_two_slots(kind) else 1
            ends = self.total_bytes(kind, 0) + self.total_bytes(kind, self.last_fragment)
            size += slots * (ends + self.model.layers * self.total_bytes(kind, 1))
        return size + sum(map(self.spills_gradient, self.blocks)) * self.total_bytes(
            "anchor", 1
        )  # four bytes an element as well

    def has_two_slots(self, kind: str) -> bool:
        return self.crash_safety == "exact" or kind == "anchor"


def moments_part_bytes(elements: int, bits: int, dtype: str) -> list[int]:
    """Bytes of the parts of a tile's moments, each in whole pages: m, v, scales where there are any, and the low halves
    of split weights."""
    scales = [round_to_pages(8 * -(-elements // TILE_GRAIN))] if bits == 8 else []
    low = [round_to_pages(2 * elements)] if dtype == "bfloat16" else []
    return [
        round_to_pages(elements * bits // 8),
        round_to_pages(elements * bits // 8),
        *scales,
        *low,
    ]


@cache
def _fragments(model: ModelSpec) -> tuple[Fragment, ...]:
    return model.fragments()


@cache
def tile_elements(model: ModelSpec, whole: bool) -> int:
    """Elements of a tile: an eighth of a block, so that reading, updating and writing overlap within one; for a state
    in memory alone the largest fragment whole. By the model alone: a state on disk fits every plan of its model."""
    sizes = [fragment.size for fragment in model.fragments()]
    wanted = max(sizes) if whole else min(max(sizes[1] // 8, 1 << 16), 1 << 24)
    return math.ceil(wanted / TILE_GRAIN) * TILE_GRAIN
