"""Describe how one machine trains one model: where its state lies and how a step is scheduled.

Pure. `search.make_plan` finds a `Plan` before anything is allocated; `program.py` turns it into
operations, and the engine executes these.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from barnraise.planning.tile_layout import TILE_GRAIN, TileLayout, lay_out_tiles
from barnraise.spec import ADAMW, MUON, Fragment, ModelSpec

PAGE = 4096  # bytes
GPU_TILE = 1 << 22  # elements that a GPU updates at a time
CACHED_MODELS = 256  # whose sizes are remembered; a site plans as many models as people type
STATE_KINDS = ("weights", "moments", "anchor", "momentum", "feedback")
REMOTE = "remote"  # the tier of a fragment whose state another machine of the crew holds


def round_to_pages(size: int) -> int:
    """Round a number of bytes up to whole pages."""
    return -(-size // PAGE) * PAGE


@dataclass(frozen=True)
class DeviceShare:
    """What one of several devices does in each step.

    Attributes:
        name: the device, as torch names it.
        micro_batches: how many it computes; the devices' runs follow each other in this order.
    """

    name: str
    micro_batches: int


@dataclass(frozen=True)
class PipelineStage:
    """What one machine of a crew does in each step.

    Attributes:
        fragments: those whose state it holds and that it computes, ascending: consecutive blocks,
            and for the lead the embedding and the final norm as well.
        sequences: of a micro-batch, which is the same on all machines.
    """

    fragments: tuple[int, ...]
    sequences: int


@dataclass(frozen=True)
class Plan:
    """Describe how one machine trains one model.

    Fragments are numbered: 0 is the embedding, then come the blocks, the last is the final norm.
    The tiers are "device" (a GPU's memory), "host" (RAM) and "disk". Without a GPU the layers
    compute in RAM; with `staged` they are first copied to separate buffers, as with a GPU. In a
    crew the plan is that of one machine's stage, and all other fragments are "remote".
    """

    model: ModelSpec
    device: str = "cpu"  # as torch names it: "cpu", "cuda" or "cuda:1"
    threads: int = 2  # CPU threads
    # The type of the streamed weights and of the multiplications. With "bfloat16" the master copy
    # is split into two halves of 16 bits.
    dtype: str = "float32"
    staged: bool = False  # whether the device has memory of its own
    sequences: int = 1  # per micro-batch
    micro_batches: int = 1  # per step
    # Blocks that all micro-batches pass before the next group is touched, from the bottom up.
    forward_groups: tuple[tuple[int, ...], ...] = ()
    # The same for the backward pass, from the top down; the blocks of a group ascend.
    backward_groups: tuple[tuple[int, ...], ...] = ()
    # How many of the top blocks retain their activations for backward; the others recompute them.
    retained_blocks: int = 0
    # The inputs that forward keeps: those of each "block", or of each backward "group".
    kept_inputs: str = "block"
    # Where the kept inputs wait: where they are computed ("device"), or on the "host".
    boundaries: str = "device"
    # With those on the host, how many of the top blocks' stay where they are computed all the same:
    # backward needs these first.
    near_inputs: int = 0
    weights: tuple[str, ...] = ()  # tier of each fragment's master copy
    moments: tuple[str, ...] = ()  # tier of each fragment's moments
    # Where gradients wait for exact clipping: "host" or, for moments on disk, "disk".
    gradients: str = "host"
    exchange: str = "host"  # tier of the anchor, the outer momentum and the error feedback
    optimizer: str = ADAMW
    moments_bits: int = 32
    clipping: str = "exact"
    # With "exact" and "restart" the state is on disk; with "round" it is checkpointed each round.
    crash_safety: str = "round"
    slots: int = 0  # buffers for blocks that have no buffer of their own
    host_slots: int = 2  # buffers in RAM between disk and device
    gradient_slots: int = 2  # for blocks whose gradients do not wait where they are computed
    host_gradient_slots: int = 2  # buffers in RAM for gradients that come from a device
    ring: int = 4  # buffers for tiles on their way between disk and optimizer
    tile: int = 0  # elements; Muon's tiles hold whole matrices, and may be larger
    deterministic: bool = False  # whether a GPU gives the same bits each time
    daily_write_limit: int | None = None  # bytes to disk; None for no limit
    # Several devices over one host copy, `device` being the first; none: that one alone.
    devices: tuple[DeviceShare, ...] = ()
    # Devices of the processes that share weights and moments by FSDP, and how many of them split
    # each block; none: this process has all of the state.
    ranks: tuple[str, ...] = ()
    tensor: int = 1
    # The following fields are predictions.
    step_seconds: float = 0.0
    # The busiest resource: "compute", "disk", "link" or "optimizer"; "disk writes a day" if that
    # limit slows the steps down.
    bottleneck: str = ""
    device_bytes: int = 0  # of the device that needs most
    card_bytes: tuple[int, ...] = ()  # of each of several devices
    host_bytes: int = 0
    disk_bytes: int = 0
    written_per_step: int = 0  # bytes to disk
    written_per_day: int = 0  # bytes to disk

    @cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """List the model's fragments in order."""
        return _fragments_of(self.model)

    @cached_property
    def local_fragments(self) -> tuple[int, ...]:
        """List the indices of the fragments that this machine holds: all, except in a crew."""
        remote = {i for i, tier in enumerate(self.weights) if tier == REMOTE}
        return tuple(i for i in range(self.last_fragment + 1) if i not in remote)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """List the embedding and the final norm if this machine holds them; it holds both."""
        return (0, self.last_fragment) if 0 in self.local_fragments else ()

    @cached_property
    def largest_fragment(self) -> int:
        """Return the elements of the largest fragment that this machine holds."""
        return max(self.fragments[i].size for i in (*self.ends, self.blocks.start))

    @cached_property
    def blocks(self) -> range:
        """Return the indices of this machine's blocks."""
        inner = [i for i in self.local_fragments if 0 < i < self.last_fragment]
        return range(inner[0], inner[-1] + 1)

    @property
    def is_stage(self) -> bool:
        """Whether other machines of a crew hold a part of the model."""
        return REMOTE in self.weights

    @cached_property
    def last_fragment(self) -> int:
        """Return the index of the final norm."""
        return self.model.layers + 1

    @cached_property
    def device_plans(self) -> tuple["Plan", ...]:
        """Return the plan of each device's own micro-batches; for one device, the plan itself."""
        if not self.devices:
            return (self,)
        return tuple(
            replace(self, device=share.name, micro_batches=share.micro_batches, devices=())
            for share in self.devices
        )

    @property
    def step_tokens(self) -> int:
        """Return the tokens of one step."""
        return self.micro_batches * self.sequences * self.model.context

    @property
    def tokens_per_second(self) -> float:
        """Return the predicted speed."""
        return self.step_tokens / self.step_seconds

    @property
    def all_device_bytes(self) -> int:
        """Return the predicted bytes of the memory of all devices."""
        return sum(self.card_bytes) or self.device_bytes * max(1, len(self.ranks))

    @property
    def on_disk(self) -> bool:
        """Whether all of the state is on disk, so that memory holds only copies of parts of it."""
        return self.crash_safety != "round"

    @property
    def commits_steps(self) -> bool:
        """Whether each step's state is committed to disk."""
        return self.crash_safety == "exact"

    # ---- rules of the schedule ----

    def update_order(self) -> list[int]:
        """List the fragments in the order in which the next forward needs them."""
        return [*self.ends, *self.blocks]

    def spills_gradient(self, i: int) -> bool:
        """Whether fragment i's gradient waits on disk."""
        waits = self.clipping == "exact" and self.gradients == "disk" and i in self.blocks
        return waits and self.moments[i] == "disk"

    def has_gradient_buffer(self, i: int) -> bool:
        """Whether fragment i's gradient has a buffer of its own where it is computed.

        The embedding and the final norm have one, and each block whose gradient waits there.
        """
        if i not in self.blocks:
            return True
        waits_here = not self.staged or self.weights[i] == "device"
        return self.clipping == "exact" and waits_here and not self.spills_gradient(i)

    def moves_gradient(self, i: int) -> bool:
        """Whether fragment i's gradient goes from the device to memory, where its update wants it.

        A device that updates a block right after its backward has the gradient there.
        """
        if not self.staged or self.weights[i] == "device":
            return False
        return self.clipping == "exact" or bool(self.devices) or not self.updates_on_device(i)

    @cached_property
    def host_gradient_buffers(self) -> int:
        """Return the number of buffers in RAM for blocks' gradients: none if none goes there."""
        return self.host_gradient_slots if any(map(self.moves_gradient, self.blocks)) else 0

    def norms_of(self, i: int) -> tuple[int, ...]:
        """List the fragments whose norm together clips fragment i, if clipping is not exact.

        That is fragment i alone. Under Muon the ends, which are updated last, get the norm of all;
        what it clips in blocks are norms and biases.
        """
        return self.local_fragments if self.optimizer == MUON and i in self.ends else (i,)

    @property
    def defers_updates(self) -> bool:
        """Whether the updates of a step run during the next step's forward.

        Exact clipping must wait for the last gradient. Deferring pays where the updates use other
        resources than the forward (the host or the disk), so that the two overlap.
        """
        return self.clipping == "exact" and (self.staged or self.on_disk)

    @cached_property
    def stored_inputs(self) -> tuple[int, ...]:
        """Return the blocks whose inputs forward stores for backward, from the bottom up."""
        if self.kept_inputs == "block":
            return tuple(self.blocks[: len(self.blocks) - self.retained_blocks])
        starts = [g[0] for g in self.backward_groups if self.recomputed_blocks(g) > 0]
        return tuple(sorted(starts))

    @cached_property
    def inputs_in_ram(self) -> tuple[int, ...]:
        """Return those of `stored_inputs` that wait in RAM: the ones that backward needs last."""
        if self.boundaries == "device":
            return ()
        return self.stored_inputs[: max(0, len(self.stored_inputs) - self.near_inputs)]

    @property
    def first_retained(self) -> int:
        """Return the index of the first block that retains its activations, or of the end."""
        return self.blocks.stop - self.retained_blocks

    def recomputed_blocks(self, group: Sequence[int]) -> int:
        """Return how many blocks of an ascending group recompute their activations."""
        return bisect_left(group, self.first_retained)

    def host_gradient_slot(self, i: int) -> int:
        """Return the number of the buffer in RAM that receives a block's gradient."""
        return i % self.host_gradient_slots

    def validate(self) -> None:
        """Check what the schedule relies on.

        Raises:
            AssertionError: the planner made a plan that cannot be executed.
        """
        assert self.staged or self.device == "cpu", "a GPU computes with staged weights"
        if self.devices:
            assert self.staged and "device" not in self.weights, (
                "what several devices compute with has its master copy in memory"
            )
            assert self.devices[0].name == self.device, "the plan's device is the first of them"
            assert sum(share.micro_batches for share in self.devices) == self.micro_batches
            assert all(share.micro_batches > 0 for share in self.devices)
        assert not self.is_stage or (self.clipping == "exact" and not self.devices), (
            "a crew clips by the norm of the whole gradient, and each machine uses one device"
        )
        assert self.optimizer == ADAMW or self.moments_bits == 32, "Muon's momentum has 32 bits"
        ends = [self.weights[i] for i in self.ends]
        moved = [i for i in self.blocks if self.weights[i] != "device"]
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
            assert self.weights[i] != "disk" or self.moments[i] == "disk", (
                "moments of weights that come from disk to a device pass through the ring with them"
            )
        # Each group holds the blocks whose gradients are in memory at the same time.
        together = [tuple(moved)] if self.clipping == "exact" else self.backward_groups
        for group in together:
            slots = [self.host_gradient_slot(i) for i in group if self.moves_gradient(i)]
            waiting = [
                self.host_gradient_slot(i)
                for i in group
                if self.moves_gradient(i) and not self.spills_gradient(i)
            ]
            shared = any(slots.count(slot) > 1 for slot in waiting)
            assert not shared, (
                f"{self.host_gradient_slots} gradient slots in memory are too few for "
                "what waits there"
            )

    def uses_ring(self, i: int) -> bool:
        """Whether the update of fragment i reads its state from disk through the ring."""
        return self.moments[i] == "disk"

    @cached_property
    def _tile_layouts(self) -> tuple[tuple[TileLayout, ...], ...]:
        """Return the tiles of the embedding, of a block and of the final norm."""
        return _tile_layouts_of(self.model, self.tile, self.optimizer)

    def tile_layouts(self, i: int) -> tuple[TileLayout, ...]:
        """Return the tiles of fragment i in order."""
        return self._tile_layouts[self._kind_of(i)]

    def _kind_of(self, i: int) -> int:
        """Return 0 for the embedding, 1 for a block (all are alike), 2 for the final norm."""
        return (i > 0) + (i == self.last_fragment)

    def tile_count(self, i: int) -> int:
        """Count the tiles of fragment i."""
        return len(self.tile_layouts(i))

    def tile_bounds(self, i: int, t: int) -> tuple[int, int]:
        """Return the elements [begin, end) of fragment i that tile t covers."""
        layout = self.tile_layouts(i)[t]
        return layout.begin, layout.end

    @property
    def largest_tile(self) -> int:
        """Return the most elements that a tile has, or `tile` if the model is smaller than that."""
        blocks = max(layout.elements for layout in self._tile_layouts[1])
        return max(self.tile, blocks)

    def trains_matrices(self, i: int) -> bool:
        """Whether fragment i holds matrices that Muon trains."""
        return self.optimizer == MUON and i in self.blocks

    def updates_on_device(self, i: int) -> bool:
        """Whether a GPU, or another device with its own memory, computes fragment i's update.

        It updates what it holds, and matrices that Muon trains wherever they lie: these need so
        many products that moving them there and back takes less time than the host would.
        """
        if self.weights[i] == "device":
            return True
        return self.device != "cpu" and self.trains_matrices(i)

    @property
    def any_on_device(self) -> bool:
        """Whether a device with its own memory computes the update of any fragment."""
        return "device" in self.weights or (self.device != "cpu" and self.optimizer == MUON)

    def writes_weights(self, i: int) -> bool:
        """Whether each update writes the weights of fragment i to disk."""
        return self.commits_steps or (self.on_disk and self.weights[i] == "disk")

    def writes_moments(self, i: int) -> bool:
        """Whether each update writes the moments of fragment i to disk."""
        return self.commits_steps or (self.on_disk and self.moments[i] == "disk")

    # ---- sizes ----

    @property
    def streamed_bytes(self) -> int:
        """Return the bytes of one streamed weight."""
        return _streamed_bytes(self.dtype)

    def record_bytes(self, kind: str, elements: int) -> int:
        """Return the bytes of a record of another kind than moments, in whole pages."""
        return _record_bytes(kind, elements, self.dtype)

    def tile_record_bytes(self, kind: str, i: int) -> tuple[int, ...]:
        """Return the bytes of the record of each tile of fragment i, in whole pages."""
        # A gradient is as large as an anchor: both have four bytes per element.
        return self._record_bytes["anchor" if kind == "gradient" else kind][self._kind_of(i)]

    def largest_record_bytes(self, kind: str) -> int:
        """Return the bytes of a buffer that holds any tile's record."""
        return max(max(sizes) for sizes in self._record_bytes[kind])

    def total_bytes(self, kind: str, i: int) -> int:
        """Return the bytes of all records of one kind of fragment i's state."""
        return self._total_bytes[kind][self._kind_of(i)]

    @cached_property
    def _total_bytes(self) -> dict[str, tuple[int, ...]]:
        """Map kind of state → bytes of the embedding, of a block, of the norm."""
        return {kind: tuple(map(sum, sizes)) for kind, sizes in self._record_bytes.items()}

    @cached_property
    def _record_bytes(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Map kind of state → bytes of each tile of the embedding, of a block, of the norm."""
        return _tile_record_bytes(
            self.model, self.tile, self.moments_bits, self.dtype, self.optimizer
        )

    def all_bytes(self, kind: str) -> int:
        """Return the bytes of all records of one kind of all fragments' state."""
        ends = sum(self.total_bytes(kind, i) for i in self.ends)
        return ends + len(self.blocks) * self.total_bytes(kind, 1)

    def ring_bytes(self) -> int:
        """Return the bytes of one buffer of the ring.

        It holds the parts of a tile that an update needs and memory does not hold.
        """
        size = self.largest_record_bytes("moments")
        if any(self.spills_gradient(i) for i in self.blocks):
            size += round_to_pages(4 * self.largest_tile)
        if self.staged and "disk" in self.weights:
            size += self.record_bytes("weights", self.largest_tile)
        return size

    def file_bytes(self) -> int:
        """Return the bytes of the state on disk.

        There are two slots for each record, or for the anchor only, and space for the gradients
        that wait on disk.
        """
        if not self.on_disk:
            return 0
        size = 0
        for kind in STATE_KINDS:
            slots = 2 if self.has_two_slots(kind) else 1
            size += slots * self.all_bytes(kind)
        # A gradient is as large as an anchor: both have four bytes per element.
        return size + sum(map(self.spills_gradient, self.blocks)) * self.total_bytes("anchor", 1)

    def has_two_slots(self, kind: str) -> bool:
        """Whether the file has two slots for each record, so that one is always intact."""
        return self.crash_safety == "exact" or kind == "anchor"


def _streamed_bytes(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def _record_bytes(kind: str, elements: int, dtype: str) -> int:
    return round_to_pages((_streamed_bytes(dtype) if kind == "weights" else 4) * elements)


@lru_cache(maxsize=CACHED_MODELS)
def _tile_layouts_of(
    model: ModelSpec, tile: int, optimizer: str
) -> tuple[tuple[TileLayout, ...], ...]:
    """Return the tiles of the embedding, of a block and of the final norm."""
    fragments = _fragments_of(model)
    return tuple(lay_out_tiles(fragments[i], tile, optimizer) for i in (0, 1, -1))


@lru_cache(maxsize=CACHED_MODELS)
def _tile_record_bytes(
    model: ModelSpec, tile: int, moments_bits: int, dtype: str, optimizer: str
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Map kind of state → bytes of each tile's record: of the embedding, a block, the final norm.

    The search tries thousands of plans for which these are the same.
    """

    def record_bytes(kind: str, layout: TileLayout) -> int:
        if kind != "moments":
            return _record_bytes(kind, layout.elements, dtype)
        sizes = (layout.elements, layout.second_moments)
        return sum(moments_part_bytes(*sizes, moments_bits, dtype))

    return {
        kind: tuple(
            tuple(record_bytes(kind, layout) for layout in layouts)
            for layouts in _tile_layouts_of(model, tile, optimizer)
        )
        for kind in STATE_KINDS
    }


def moments_part_bytes(elements: int, second_moments: int, bits: int, dtype: str) -> list[int]:
    """Return the bytes of each part of a tile's moments, in whole pages.

    The parts are m, v, which is of `second_moments` elements, the scales of 8-bit moments, and the
    low halves of split weights; the latter two only where there are any.
    """
    scales = [round_to_pages(8 * -(-elements // TILE_GRAIN))] if bits == 8 else []
    low = [round_to_pages(2 * elements)] if dtype == "bfloat16" else []
    return [
        round_to_pages(elements * bits // 8),
        round_to_pages(second_moments * bits // 8),
        *scales,
        *low,
    ]


@lru_cache(maxsize=CACHED_MODELS)
def _fragments_of(model: ModelSpec) -> tuple[Fragment, ...]:
    return model.fragments()


@lru_cache(maxsize=CACHED_MODELS)
def tile_elements(model: ModelSpec, whole: bool) -> int:
    """Return the number of elements of a tile.

    A tile is an eighth of a block, so that reading, updating and writing overlap within a block.
    With `whole`, for a state in memory only, it is the largest fragment. The size depends on the
    model only, so that a state on disk fits every plan of its model.
    """
    sizes = [fragment.size for fragment in model.fragments()]
    wanted = max(sizes) if whole else min(max(sizes[1] // 8, 1 << 16), 1 << 24)
    return math.ceil(wanted / TILE_GRAIN) * TILE_GRAIN
