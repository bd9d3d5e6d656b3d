"""When each operation of a plan's steps would run on a given machine: the very program the engine runs, with seconds
from `costs` in place of the work. Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from barnraise.planning import cost_model, program
from barnraise.planning.hardware import Hardware
from barnraise.planning.program import Hazards, LaneName, Operation, OperationKind

if TYPE_CHECKING:
    from barnraise.planning.plan import Plan

COMMIT_SECONDS = 0.01  # two flushes of a disk's cache
SQUARED_BYTES = 12  # of an element whose square is made and then added up: read twice, written once
TILES = 8  # of a block are told apart, as the tiles of a smaller model are; a block of GPT-3 175B has 108


@dataclass(frozen=True)
class Span:
    op: Operation
    begin: float  # seconds
    end: float


def simulate(
    programs: Sequence[Sequence[Operation]], seconds: Callable[[Operation], float], eager: bool
) -> list[list[Span]]:
    """Runs programs one after the other. `eager`: who submits does not wait for what is computed (a GPU's kernels)."""
    hazards, free, clock = Hazards(), dict.fromkeys(LaneName, 0.0), 0.0
    done: list[list[Span]] = []
    for ops in programs:
        spans = []
        for op in ops:
            begin = max(
                free[op.lane],
                *(span.end for span in hazards.dependencies(op)),
                0.0 if eager else clock,
            )
            span = Span(op, begin, begin + seconds(op))
            free[op.lane] = span.end
            if op.lane in (LaneName.READ, LaneName.WRITE):  # one disk
                free[LaneName.READ] = free[LaneName.WRITE] = span.end
            if op.lane is LaneName.COMPUTE:
                clock = span.end
            hazards.record(op, span)
            spans.append(span)
        done.append(spans)
    return done


def _coarse(plan: "Plan") -> "Plan":
    """The plan with tiles that stand for several of its own where blocks have many, in a ring of about as many bytes:
    what one overlaps with hardly depends on it, and how long this takes does."""
    merged = -(-plan.tile_count(1) // TILES)
    if merged == 1:
        return plan
    return replace(
        plan, tile=plan.tile * merged, ring=max(2, plan.ring // merged) if plan.ring else 0
    )


class StepSimulation:
    """A plan's steps in their stride on `hardware`."""

    def __init__(self, plan: "Plan", hardware: Hardware):
        self.plan, self.hardware = _coarse(plan), hardware
        self._known: dict[Any, float] = {}

    @cached_property
    def spans(self) -> list[Span]:
        """Of one step, after a first; begins at 0 with its own first computation's wait."""
        first = program.step_program(self.plan)
        second = program.step_program(
            self.plan, pending=self.plan.defers_updates, cached=first.cached
        )
        third = second
        if second.cached != first.cached:
            third = program.step_program(
                self.plan, pending=self.plan.defers_updates, cached=second.cached
            )
        before, mine = simulate(
            [second.operations, third.operations],
            self.operation_seconds,
            eager=self.plan.device == "cuda",
        )
        start = self._end(before)
        return [Span(s.op, s.begin - start, s.end - start) for s in mine]

    @staticmethod
    def _end(spans: Sequence[Span]) -> float:
        return max(span.end for span in spans if span.op.lane is LaneName.COMPUTE)

    @property
    def step_seconds(self) -> float:
        return self._end(self.spans) + self._undeferred

    @property
    def _undeferred(self) -> float:
        """Exact clipping with nothing to hide under: the updates follow the step."""
        plan = self.plan
        if plan.clipping != "exact" or plan.defers_updates:
            return 0.0
        return sum(self._update(i, plan.fragments[i].size) for i in range(plan.last_fragment + 1))

    def busy_seconds(self) -> dict[LaneName, float]:
        """Seconds each lane works in a step."""
        found = dict.fromkeys(LaneName, 0.0)
        for span in self.spans:
            found[span.op.lane] += span.end - span.begin
        found[LaneName.COMPUTE] += self._undeferred
        return found

    def operation_seconds(self, op: Operation) -> float:
        plan, i = self.plan, op.blocks[0] if op.blocks else 0
        blocks_are_alike = op.kind is not OperationKind.BACKWARD and 0 < i < plan.last_fragment
        which = (
            (len(op.blocks), plan.weights[i], plan.spills_gradient(i))
            if blocks_are_alike
            else op.blocks
        )
        key = (op.kind, which, op.tile, op.ring_slot >= 0)
        if key not in self._known:
            self._known[key] = self._seconds(op)
        return self._known[key]

    def _seconds(self, op: Operation) -> float:
        plan, hw, model = self.plan, self.hardware, self.plan.model
        again = plan.last_fragment - plan.retained_blocks  # blocks below compute again
        match op.kind:
            case OperationKind.READ:
                return plan.total_bytes("weights", op.blocks[0]) / hw.disk_read
            case OperationKind.FETCH:
                return self._tile_bytes(op) / hw.disk_read
            case OperationKind.STORE:
                size = (
                    self._tile_bytes(op, back=True)
                    if op.ring_slot >= 0
                    else plan.total_bytes("moments", op.blocks[0])
                )
                return size / hw.disk_write
            case OperationKind.WRITE:
                return plan.total_bytes("weights", op.blocks[0]) / hw.disk_write
            case OperationKind.SPILL:
                return plan.total_bytes("anchor", op.blocks[0]) / hw.disk_write
            case OperationKind.LOAD:
                return plan.fragments[op.blocks[0]].size * plan.streamed_bytes / hw.to_device
            case OperationKind.OFFLOAD:
                return plan.fragments[op.blocks[0]].size * 4 / hw.from_device
            case OperationKind.EMBED | OperationKind.EMBED_BACKWARD:
                return plan.micro_batches * cost_model.embed_seconds(hw, model, plan.sequences)
            case OperationKind.FORWARD:
                each = cost_model.block_forward_seconds(hw, model, plan.sequences, dtype=plan.dtype)
                return plan.micro_batches * len(op.blocks) * each
            case OperationKind.BACKWARD:
                forward = cost_model.block_forward_seconds(
                    hw, model, plan.sequences, dtype=plan.dtype
                )
                backward = cost_model.block_backward_seconds(
                    hw, model, plan.sequences, dtype=plan.dtype
                )
                anew = cost_model.block_again_seconds(hw, model, plan.sequences, dtype=plan.dtype)
                recomputed = sum(i < again for i in op.blocks)
                whole = (
                    max(0, recomputed - 1) if plan.kept_inputs == "group" else 0
                )  # for the inputs of others
                return plan.micro_batches * (
                    whole * forward + recomputed * anew + len(op.blocks) * backward
                )
            case OperationKind.HEAD:
                return plan.micro_batches * cost_model.head_seconds(
                    hw, model, plan.sequences, dtype=plan.dtype
                )
            case OperationKind.NORM:
                return plan.fragments[op.blocks[0]].size * SQUARED_BYTES / hw.stream
            case OperationKind.UPDATE:
                begin, end = (
                    plan.tile_bounds(op.blocks[0], op.tile)
                    if op.tile >= 0
                    else (0, plan.fragments[op.blocks[0]].size)
                )
                return self._update(op.blocks[0], end - begin)
            case OperationKind.COMMIT:
                return COMMIT_SECONDS
        raise AssertionError(op)

    def _update(self, i: int, elements: int) -> float:
        plan = self.plan
        where = "device" if plan.weights[i] == "device" else "host"
        return cost_model.adam_seconds(
            self.hardware, elements, plan.dtype, plan.moments_bits, where
        )

    def _tile_bytes(self, op: Operation, back: bool = False) -> int:
        """Of what passes through the ring with one tile, to memory or `back`."""
        plan, (i,) = self.plan, op.blocks
        begin, end = plan.tile_bounds(i, op.tile)
        size = plan.record_bytes("moments", end - begin)
        if plan.staged and plan.weights[i] == "disk":
            size += plan.record_bytes("weights", end - begin)
        return (
            size
            if back or not plan.spills_gradient(i)
            else size + plan.record_bytes("anchor", end - begin)
        )
