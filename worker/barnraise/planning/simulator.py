"""Predict when each operation of a plan's steps would run on a given machine.

Pure. The simulation takes the same program as the engine and the durations from `cost_model.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from barnraise.planning import cost_model, program
from barnraise.planning.hardware import Hardware
from barnraise.planning.program import LaneName, Operation, OperationKind, Resource
from barnraise.spec.architectures import architecture_of

if TYPE_CHECKING:
    from barnraise.planning.plan import Plan

COMMIT_SECONDS = 0.01  # two flushes of a disk's cache
# Memory traffic per element of a norm: the element is read, its square written and read again.
SQUARED_BYTES = 12
# The number of tiles of a block that are simulated apart; a block of GPT-3 175B has 108 tiles.
TILES = 8
# Steps are simulated until two in a row differ by less than this fraction. A disk that is slower
# than the rest falls behind by more in each step, until the buffers are full.
STEADY = 0.01
MOST_STEPS = 8
DISK_LANES = (LaneName.READ, LaneName.WRITE)
WRITES = (OperationKind.STORE, OperationKind.WRITE, OperationKind.SPILL)


@dataclass(frozen=True)
class Span:
    """Say when an operation runs, in seconds."""

    op: Operation
    begin: float
    end: float


class Timeline:
    """Place programs in time, one after the other, by the rules of `program.Hazards`.

    An operation begins when its lane is free and the operations that it waits for have ended. For
    these only the latest end counts, so that two times a buffer stand for the tokens of `Hazards`.
    """

    def __init__(self, seconds: Callable[[Operation], float], eager: bool) -> None:
        """Begin at time 0 with all lanes idle.

        Args:
            seconds: the duration of an operation.
            eager: whether the engine submits operations without waiting for earlier computations,
                as with a GPU's kernels.
        """
        self._seconds = seconds
        self._eager = eager
        # When each device's lane ends its last operation.
        self._lane_free: dict[tuple[LaneName, int], float] = {}
        self._compute_end = 0.0
        self._changed: dict[Resource, float] = {}  # when a buffer's last change ends
        self._used: dict[Resource, float] = {}  # when its last use since that change ends

    def append(self, operations: Iterable[Operation]) -> list[Span]:
        """Return the spans of a program that follows those appended before."""
        return [self._append_operation(op) for op in operations]

    def _append_operation(self, op: Operation) -> Span:
        changed, used = self._changed, self._used
        begin = self._lane_free.get((op.lane, op.device), 0.0)
        if not self._eager and self._compute_end > begin:
            begin = self._compute_end
        for resource in (*op.uses, *op.changes):
            if (changed_at := changed.get(resource, 0.0)) > begin:
                begin = changed_at
        for resource in op.changes:
            if (used_until := used.get(resource, 0.0)) > begin:
                begin = used_until
        end = begin + self._seconds(op)
        self._lane_free[op.lane, op.device] = end
        if op.lane in DISK_LANES:  # both lanes share one disk
            self._lane_free[LaneName.READ, 0] = self._lane_free[LaneName.WRITE, 0] = end
        elif op.lane is LaneName.COMPUTE and op.device == 0:
            self._compute_end = end
        for resource in op.uses:
            if end > used.get(resource, 0.0):
                used[resource] = end
        for resource in op.changes:
            changed[resource] = end
            used[resource] = 0.0
        return Span(op, begin, end)


def _merge_tiles(plan: "Plan") -> "Plan":
    """Merge tiles of a plan whose blocks have many, with a ring of about as many bytes.

    Merging hardly changes what overlaps, but makes the simulation much faster.
    """
    merged = -(-plan.tile_count(1) // TILES)
    if merged == 1:
        return plan
    ring = max(2, plan.ring // merged) if plan.ring else 0
    return replace(plan, tile=plan.tile * merged, ring=ring)


class StepSimulation:
    """Simulate a plan's steps on `hardware`, until each takes as long as the one before."""

    def __init__(self, plan: "Plan", hardware: Hardware) -> None:
        self.plan = _merge_tiles(plan)
        self.hardware = hardware
        self._machines = (hardware, *hardware.others)  # by the number of the device
        self._seconds_of: dict[tuple[object, ...], float] = {}  # durations computed so far

    @cached_property
    def spans(self) -> list[Span]:
        """Return the spans of one step of many.

        Time 0 is the end of the previous step's last computation.
        """
        first = program.step_program(self.plan)
        second = program.step_program(
            self.plan, pending=self.plan.defers_updates, cached=first.cached
        )
        later = second
        if second.cached != first.cached:
            later = program.step_program(
                self.plan, pending=self.plan.defers_updates, cached=second.cached
            )
        timeline = Timeline(self.operation_seconds, eager=self.plan.device != "cpu")
        begin, end = 0.0, self._end(timeline.append(second.operations))
        spans: list[Span] = []
        for _ in range(MOST_STEPS):
            last_seconds = end - begin
            begin = end
            spans = timeline.append(later.operations)
            end = self._end(spans)
            if abs(end - begin - last_seconds) <= STEADY * last_seconds:
                break
        return [Span(span.op, span.begin - begin, span.end - begin) for span in spans]

    @staticmethod
    def _end(spans: Sequence[Span]) -> float:
        return max(
            span.end
            for span in spans
            if span.op.lane is LaneName.COMPUTE or span.op.kind is OperationKind.NORM
        )

    @property
    def step_seconds(self) -> float:
        """Return the duration of one step of many in seconds.

        No resource can be busy for longer than that, and the disk not at the rate at which it only
        writes its cache.
        """
        busy = self.busy_seconds()
        return max(
            self._end(self.spans) + self._deferred_update_seconds,
            *busy.values(),
            self._sustained_disk_seconds,
            self.shared_memory_seconds,
        )

    @property
    def shared_memory_seconds(self) -> float:
        """Return the seconds of RAM's traffic if several devices share it; 0 for one."""
        plan = self.plan
        if not plan.devices:
            return 0.0
        copied = {
            OperationKind.LOAD: plan.streamed_bytes,
            OperationKind.OFFLOAD: cost_model.FP32_BYTES,
        }
        seconds = 0.0
        for span in self.spans:
            if span.op.kind in copied:
                size = self._count_elements(span.op) * copied[span.op.kind]
                seconds += size / self.hardware.stream
            elif span.op.lane is LaneName.OPTIMIZER:
                seconds += span.end - span.begin
        return seconds

    @cached_property
    def _sustained_disk_seconds(self) -> float:
        """Return the seconds of a step's reads and writes, for a disk that never rests."""
        slowdown = self.hardware.disk_write / self.hardware.sustained_disk_write
        seconds = 0.0
        for span in self.spans:
            if span.op.lane in DISK_LANES:
                writes = span.op.kind in WRITES
                seconds += (span.end - span.begin) * (slowdown if writes else 1.0)
        return seconds

    @property
    def _deferred_update_seconds(self) -> float:
        """Return the seconds of the updates that follow the step under exact clipping.

        They are 0 if the updates run during the step.
        """
        plan = self.plan
        if plan.clipping != "exact" or plan.defers_updates:
            return 0.0
        return sum(map(self.update_seconds, plan.local_fragments))

    def busy_seconds(self) -> dict[LaneName, float]:
        """Return the seconds each lane works in a step, on the device where it works longest."""
        by_device = [dict.fromkeys(LaneName, 0.0) for _ in self.plan.device_plans]
        for span in self.spans:
            by_device[span.op.device][span.op.lane] += span.end - span.begin
        by_device[0][LaneName.COMPUTE] += self._deferred_update_seconds
        for seconds, plan, hardware in zip(
            by_device, self.plan.device_plans, self._machines, strict=False
        ):
            waiting = plan.stored_activations - plan.micro_batches
            seconds[LaneName.OUT] += waiting * self._input_seconds(hardware.from_device)
            seconds[LaneName.IN] += waiting * self._input_seconds(hardware.to_device)
        return {lane: max(seconds[lane] for seconds in by_device) for lane in LaneName}

    def _input_seconds(self, rate: float) -> float:
        """Return the seconds in which a block's input goes to RAM or back, if it waits there."""
        if self.plan.boundaries != "host":
            return 0.0
        return cost_model.stream_bytes(self.plan.model, self.plan.sequences) / rate

    def _inputs_seconds(self, op: Operation) -> float:
        """Return the seconds of the copies of inputs that a group's computation waits for."""
        plan, hardware = self.plan.device_plans[op.device], self._machines[op.device]
        inputs = plan.recomputed_blocks(op.blocks)
        if plan.kept_inputs == "group":
            inputs = min(1, inputs)
        rate = hardware.to_device
        if op.kind is OperationKind.FORWARD:
            rate = hardware.from_device
        return plan.micro_batches * inputs * self._input_seconds(rate)

    def operation_seconds(self, op: Operation) -> float:
        """Return the predicted duration of an operation in seconds."""
        plan = self.plan
        i = op.blocks[0] if op.blocks else 0
        cost_key: tuple[object, ...] = op.blocks  # blocks are alike: many operations cost the same
        if op.kind in (OperationKind.FORWARD, OperationKind.BACKWARD):
            cost_key = (len(op.blocks), plan.recomputed_blocks(op.blocks))
        elif 0 < i < plan.last_fragment:
            cost_key = (plan.weights[i], plan.spills_gradient(i))
        key = (op.kind, cost_key, op.tile, op.ring_slot >= 0, op.device)
        if key not in self._seconds_of:
            self._seconds_of[key] = self._seconds(op)
        return self._seconds_of[key]

    def _seconds(self, op: Operation) -> float:
        match op.kind:
            case OperationKind.READ | OperationKind.FETCH:
                return self._bytes_read(op) / self.hardware.disk_read
            case OperationKind.STORE | OperationKind.WRITE | OperationKind.SPILL:
                return self._bytes_written(op) / self.hardware.disk_write
            case OperationKind.LOAD:
                rate = self._machines[op.device].to_device
                return self._count_elements(op) * self.plan.streamed_bytes / rate
            case OperationKind.OFFLOAD:
                return self._count_elements(op) * 4 / self._machines[op.device].from_device
            case OperationKind.ADD:
                added = (len(self.plan.devices) - 1) * cost_model.ADDED_GRADIENT_BYTES
                return self._count_elements(op) * added / self.hardware.stream
            case OperationKind.NORM:
                on_host = op.lane is LaneName.OPTIMIZER
                rate = self.hardware.stream if on_host else self.hardware.compute_stream
                return self._count_elements(op) * SQUARED_BYTES / rate
            case OperationKind.UPDATE:
                return self.update_seconds(op.blocks[0], op.tile)
            case OperationKind.COMMIT:
                return COMMIT_SECONDS
            case _:
                return self._computation_seconds(op)

    def _count_elements(self, op: Operation) -> int:
        """Return the number of elements of an operation's fragment."""
        return self.plan.fragments[op.blocks[0]].size

    def _bytes_read(self, op: Operation) -> int:
        """Return the bytes that a READ or FETCH reads from disk."""
        if op.kind is OperationKind.READ:
            return self.plan.total_bytes("weights", op.blocks[0])
        return self._tile_bytes(op)

    def _bytes_written(self, op: Operation) -> int:
        """Return the bytes that a STORE, WRITE or SPILL writes to disk."""
        if op.kind is OperationKind.WRITE:
            return self.plan.total_bytes("weights", op.blocks[0])
        if op.kind is OperationKind.SPILL:
            return self.plan.total_bytes("anchor", op.blocks[0])
        if op.ring_slot >= 0:
            return self._tile_bytes(op, back=True)
        return self.plan.total_bytes("moments", op.blocks[0])

    def _computation_seconds(self, op: Operation) -> float:
        """Return the seconds of a computation for all micro-batches of its device in a step."""
        plan, hardware = self.plan.device_plans[op.device], self._machines[op.device]
        model = plan.model
        match op.kind:
            case OperationKind.EMBED | OperationKind.EMBED_BACKWARD:
                return plan.micro_batches * cost_model.embed_seconds(
                    hardware, model, plan.sequences
                )
            case OperationKind.FORWARD:
                forward = cost_model.block_forward_seconds(
                    hardware, model, plan.sequences, dtype=plan.dtype
                )
                seconds = plan.micro_batches * len(op.blocks) * forward
                return max(seconds, self._inputs_seconds(op), self._launch_seconds(op))
            case OperationKind.BACKWARD:
                seconds = plan.micro_batches * self._backward_seconds(op)
                return max(seconds, self._inputs_seconds(op), self._launch_seconds(op))
            case OperationKind.HEAD:
                seconds = plan.micro_batches * cost_model.head_seconds(
                    hardware, model, plan.sequences, dtype=plan.dtype
                )
                return max(seconds, self._launch_seconds(op))
            case _:
                raise AssertionError(op)

    def _launch_seconds(self, op: Operation) -> float:
        """Return the seconds in which a GPU's host starts an operation's kernels.

        One thread of Python runs at a time, so that several devices' launches take turns.
        How many kernels `torch.compile` leaves depends on the GPU: they are not priced.
        """
        plan = self.plan
        if plan.device == "cpu" or plan.compiled:
            return 0.0
        forward, backward = architecture_of(plan.model).block_kernels[plan.dtype]
        if op.kind is OperationKind.HEAD:
            kernels = cost_model.HEAD_KERNELS[plan.dtype]
        else:
            kernels = forward if op.kind is OperationKind.FORWARD else backward
            kernels *= len(op.blocks)
        return cost_model.launch_seconds(self.hardware, plan.micro_batches * kernels)

    def _backward_seconds(self, op: Operation) -> float:
        """Return the seconds of the backward of a group of blocks for one micro-batch.

        Blocks below the retained ones recompute their activations. If forward kept only the inputs
        of the group, all but one of these blocks also run a whole forward, which gives the inputs
        of the others.
        """
        plan, hardware = self.plan, self._machines[op.device]
        model = plan.model
        forward = cost_model.block_forward_seconds(
            hardware, model, plan.sequences, dtype=plan.dtype
        )
        backward = cost_model.block_backward_seconds(
            hardware, model, plan.sequences, dtype=plan.dtype, deterministic=plan.deterministic
        )
        recompute = cost_model.block_recompute_seconds(
            hardware, model, plan.sequences, dtype=plan.dtype
        )
        recomputed = plan.recomputed_blocks(op.blocks)
        repeated = max(0, recomputed - 1) if plan.kept_inputs == "group" else 0
        return repeated * forward + recomputed * recompute + len(op.blocks) * backward

    def update_seconds(self, i: int, tile: int = -1) -> float:
        """Return the seconds of the update of fragment i, or of one tile of it."""
        plan, hardware = self.plan, self.hardware
        layouts = plan.tile_layouts(i)
        layouts = layouts if tile < 0 else layouts[tile : tile + 1]
        where = "device" if plan.updates_on_device(i) else "host"
        # Of a matrix, AdamW's rate is not asked for: all its traffic is in Muon's own price.
        adam_elements = sum(layout.second_moments for layout in layouts)
        seconds = cost_model.adam_seconds(
            hardware, adam_elements, plan.dtype, plan.moments_bits, where
        )
        shapes = [(m.rows, m.columns) for layout in layouts for m in layout.matrices]
        seconds += cost_model.muon_seconds(hardware, shapes)
        if shapes and plan.staged and plan.weights[i] != "device" and where == "device":
            moved = sum(layout.elements for layout in layouts)
            low = plan.streamed_bytes if plan.dtype == "bfloat16" else 0
            state = plan.streamed_bytes + low + cost_model.FP32_BYTES  # with the momentum
            seconds += moved * (state + cost_model.FP32_BYTES) / hardware.to_device
            seconds += moved * state / hardware.from_device
        return seconds

    def _tile_bytes(self, op: Operation, back: bool = False) -> int:
        """Return the bytes that pass through the ring with one tile, to memory or `back`."""
        plan = self.plan
        (i,) = op.blocks
        begin, end = plan.tile_bounds(i, op.tile)
        size = plan.tile_record_bytes("moments", i)[op.tile]
        if plan.staged and plan.weights[i] == "disk":
            size += plan.record_bytes("weights", end - begin)
        if plan.spills_gradient(i) and not back:
            size += plan.record_bytes("anchor", end - begin)
        return size
