"""When each operation of a plan's steps would run on a given machine: the very program the engine runs, with seconds
from `costs` in place of the work. Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from barnraise.planning import cost_model, program
from barnraise.planning.hardware import Hardware
from barnraise.planning.program import Hazards, Kind, Lane, Op

if TYPE_CHECKING:
    from barnraise.planning.plan import Plan

COMMIT_SECONDS = 0.01  # two flushes of a disk's cache
SQUARED_BYTES = 12  # of an element whose square is made and then added up: read twice, written once
TILES = 8  # of a block are told apart, as the tiles of a smaller model are; a block of GPT-3 175B has 108


@dataclass(frozen=True)
class Span:
    op: Op
    begin: float  # seconds
    end: float


def simulate(
    programs: Sequence[Sequence[Op]], seconds: Callable[[Op], float], eager: bool
) -> list[list[Span]]:
    """Runs programs one after the other. `eager`: who submits does not wait for what is computed (a GPU's kernels)."""
    hazards, free, clock = Hazards(), dict.fromkeys(Lane, 0.0), 0.0
    done: list[list[Span]] = []
    for ops in programs:
        spans = []
        for op in ops:
            begin = max(
                free[op.lane], *(span.end for span in hazards.before(op)), 0.0 if eager else clock
            )
            span = Span(op, begin, begin + seconds(op))
            free[op.lane] = span.end
            if op.lane in (Lane.READ, Lane.WRITE):  # one disk
                free[Lane.READ] = free[Lane.WRITE] = span.end
            if op.lane is Lane.COMPUTE:
                clock = span.end
            hazards.note(op, span)
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


class Steps:
    """A plan's steps in their stride on `hardware`."""

    def __init__(self, plan: "Plan", hardware: Hardware):
        self.plan, self.hardware = _coarse(plan), hardware
        self._known: dict[Any, float] = {}

    @cached_property
    def spans(self) -> list[Span]:
        """Of one step, after a first; begins at 0 with its own first computation's wait."""
        first = program.step(self.plan)
        second = program.step(self.plan, pending=self.plan.defers, cached=first.cached)
        third = second
        if second.cached != first.cached:
            third = program.step(self.plan, pending=self.plan.defers, cached=second.cached)
        before, mine = simulate(
            [second.ops, third.ops], self.seconds, eager=self.plan.device == "cuda"
        )
        start = self._end(before)
        return [Span(s.op, s.begin - start, s.end - start) for s in mine]

    @staticmethod
    def _end(spans: Sequence[Span]) -> float:
        return max(span.end for span in spans if span.op.lane is Lane.COMPUTE)

    @property
    def step_seconds(self) -> float:
        return self._end(self.spans) + self._undeferred

    @property
    def _undeferred(self) -> float:
        """Exact clipping with nothing to hide under: the updates follow the step."""
        plan = self.plan
        if plan.clipping != "exact" or plan.defers:
            return 0.0
        return sum(self._update(i, plan.fragments[i].size) for i in range(plan.last + 1))

    def busy(self) -> dict[Lane, float]:
        """Seconds each lane works in a step."""
        found = dict.fromkeys(Lane, 0.0)
        for span in self.spans:
            found[span.op.lane] += span.end - span.begin
        found[Lane.COMPUTE] += self._undeferred
        return found

    def seconds(self, op: Op) -> float:
        plan, i = self.plan, op.blocks[0] if op.blocks else 0
        blocks_are_alike = op.kind is not Kind.BACKWARD and 0 < i < plan.last
        which = (
            (len(op.blocks), plan.weights[i], plan.spilled(i)) if blocks_are_alike else op.blocks
        )
        key = (op.kind, which, op.tile, op.ring >= 0)
        if key not in self._known:
            self._known[key] = self._seconds(op)
        return self._known[key]

    def _seconds(self, op: Op) -> float:
        plan, hw, model = self.plan, self.hardware, self.plan.model
        again = plan.last - plan.retained  # blocks below compute again
        match op.kind:
            case Kind.READ:
                return plan.total("weights", op.blocks[0]) / hw.disk_read
            case Kind.FETCH:
                return self._tile_bytes(op) / hw.disk_read
            case Kind.STORE:
                size = (
                    self._tile_bytes(op, back=True)
                    if op.ring >= 0
                    else plan.total("moments", op.blocks[0])
                )
                return size / hw.disk_write
            case Kind.WRITE:
                return plan.total("weights", op.blocks[0]) / hw.disk_write
            case Kind.SPILL:
                return plan.total("anchor", op.blocks[0]) / hw.disk_write
            case Kind.LOAD:
                return plan.fragments[op.blocks[0]].size * plan.streamed_bytes / hw.to_device
            case Kind.OFFLOAD:
                return plan.fragments[op.blocks[0]].size * 4 / hw.from_device
            case Kind.EMBED | Kind.EMBED_BACKWARD:
                return plan.micro_batches * cost_model.embed_seconds(hw, model, plan.sequences)
            case Kind.FORWARD:
                each = cost_model.block_forward_seconds(hw, model, plan.sequences, dtype=plan.dtype)
                return plan.micro_batches * len(op.blocks) * each
            case Kind.BACKWARD:
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
            case Kind.HEAD:
                return plan.micro_batches * cost_model.head_seconds(
                    hw, model, plan.sequences, dtype=plan.dtype
                )
            case Kind.NORM:
                return plan.fragments[op.blocks[0]].size * SQUARED_BYTES / hw.stream
            case Kind.UPDATE:
                begin, end = (
                    plan.bounds(op.blocks[0], op.tile)
                    if op.tile >= 0
                    else (0, plan.fragments[op.blocks[0]].size)
                )
                return self._update(op.blocks[0], end - begin)
            case Kind.COMMIT:
                return COMMIT_SECONDS
        raise AssertionError(op)

    def _update(self, i: int, elements: int) -> float:
        plan = self.plan
        where = "device" if plan.weights[i] == "device" else "host"
        return cost_model.adam_seconds(
            self.hardware, elements, plan.dtype, plan.moments_bits, where
        )

    def _tile_bytes(self, op: Op, back: bool = False) -> int:
        """Of what passes through the ring with one tile, to memory or `back`."""
        plan, (i,) = self.plan, op.blocks
        begin, end = plan.bounds(i, op.tile)
        size = plan.record("moments", end - begin)
        if plan.staged and plan.weights[i] == "disk":
            size += plan.record("weights", end - begin)
        return size if back or not plan.spilled(i) else size + plan.record("anchor", end - begin)
