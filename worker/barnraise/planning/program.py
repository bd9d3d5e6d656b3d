"""What one step of a swapped model does, in order: a plan turned into plain operations. Pure.

The order is *vertical*: every micro-batch goes through a group of blocks before the next group is touched, so that
weights travel twice a step and not twice a micro-batch. The list is a correct sequential program. What may overlap
follows from it: each operation names the buffers it reads and changes, works on one lane, and waits for those before it
that touch the same buffers (`Hazards`). The engine runs the list so; `timeline.py` predicts with the very same rules.

Blocks are paged with the future known (Belady 1966): a buffer is given up for the block whose next use is farthest, so
that what forward used last is still there when backward begins.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from barnraise.planning.plan import Plan


class OperationKind(StrEnum):
    """What an operation does. `blocks` are fragments' indices; `slots` the buffers given to them, in the same order."""

    READ = "read"  # a block's weights: disk → memory
    LOAD = "load"  # memory → device
    EMBED = "embed"  # tokens → the first block's inputs
    FORWARD = "forward"  # all micro-batches through a group
    HEAD = "head"  # losses, and their gradients by the last block's outputs
    BACKWARD = "backward"  # all micro-batches back through a group; leaves its gradients
    EMBED_BACKWARD = "embed backward"  # and the tied table's two gradients are added
    NORM = "norm"  # of one fragment's gradient
    OFFLOAD = "offload"  # a gradient: device → memory
    SPILL = "spill"  # a gradient: memory → disk
    FETCH = "fetch"  # a tile of what an update needs and memory does not hold: disk → ring
    UPDATE = (
        "update"  # AdamW on a fragment, or on one tile of it; other machines' updates are folded in
    )
    STORE = "store"  # a tile: ring → disk, or a fragment's moments that memory holds
    WRITE = "write"  # a block's weights: memory → disk
    COMMIT = "commit"  # what is on disk is now the state


class LaneName(StrEnum):
    COMPUTE = "compute"
    IN = "copy in"
    OUT = "copy out"
    OPTIMIZER = "optimizer"
    READ = "disk read"
    WRITE = "disk write"


Resource = tuple[Any, ...]  # a buffer's name: ("slot", 2), ("ring", 0), ("record", "weights", 7)


@dataclass(frozen=True)
class Operation:
    kind: OperationKind
    lane: LaneName
    blocks: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()  # weights' slots; -1: the fragment's own buffer
    gradients: tuple[int, ...] = ()  # gradients' slots; -1: the fragment's own buffer
    tile: int = -1  # -1: the whole fragment
    ring_slot: int = -1  # which buffer of the ring
    uses: tuple[Resource, ...] = ()
    changes: tuple[Resource, ...] = ()

    def __str__(self) -> str:
        tile = f" tile {self.tile}" if self.tile >= 0 else ""
        return f"{self.kind} {','.join(map(str, self.blocks))}{tile}".strip()


@dataclass(frozen=True)
class Program:
    """Operations in order, and which block is in which slot afterwards."""

    operations: tuple[Operation, ...]
    cached: Mapping[int, int] = field(default_factory=dict)


class Hazards:
    """For each operation in turn, the earlier ones it must wait for: the last change of what it uses, and the last
    change and all uses since of what it changes. Tokens stand for operations: indices here, events in the engine."""

    def __init__(self) -> None:
        self._changed: dict[Resource, Any] = {}
        self._used: dict[Resource, list[Any]] = {}

    def dependencies(self, op: Operation) -> list[Any]:
        found: dict[int, Any] = {}
        for resource in op.uses:
            if (token := self._changed.get(resource)) is not None:
                found[id(token)] = token
        for resource in op.changes:
            for token in (*self._used.get(resource, ()), self._changed.get(resource)):
                if token is not None:
                    found[id(token)] = token
        return list(found.values())

    def record(self, op: Operation, token: Any) -> None:
        for resource in op.uses:
            if resource not in op.changes:
                self._used.setdefault(resource, []).append(token)
        for resource in op.changes:
            self._changed[resource] = token
            self._used[resource] = []


def step_program(
    plan: "Plan", pending: bool = False, cached: Mapping[int, int] | None = None
) -> Program:
    """One optimizer step. `pending`: the updates of the step before are still to be made (exact clipping waits for the
    last gradient; the updates then run during this forward). `cached`: what earlier programs left in the slots."""
    return _Writer(plan, cached or {}).step(pending)


def flush_program(plan: "Plan", cached: Mapping[int, int] | None = None) -> Program:
    """The pending updates alone."""
    return _Writer(plan, cached or {}).flush()


@dataclass(frozen=True)
class _Stage:
    """A stretch that needs some blocks in slots: a forward, a backward, or an update in place."""

    what: OperationKind
    blocks: tuple[int, ...]


class _Writer:
    def __init__(self, plan: "Plan", cached: Mapping[int, int]):
        plan.validate()
        self.plan = plan
        self.ops: list[Operation] = []
        self.slot_of = dict(cached)
        self.free = [s for s in range(plan.slots) if s not in self.slot_of.values()]
        self.gradient_of: dict[int, int] = {}
        self.next_gradient = 0
        self.last = len(plan.weights) - 1
        self.fetched = 0  # tiles requested so far
        self.tiles: list[
            tuple[int, int]
        ] = []  # all tiles that pass through the ring, in order of use
        self.stored = 0

    # ---- programs --------------------------------------------------------------------------------------------

    def step(self, pending: bool) -> Program:
        plan = self.plan
        immediate = plan.clipping != "exact"
        updates = plan.update_order()
        forward: list[_Stage] = []
        if pending and plan.staged:
            forward += [_Stage(OperationKind.UPDATE, (i,)) for i in updates]
        elif pending:
            forward += [_Stage(OperationKind.UPDATE, (i,)) for i in (0, self.last)]
        for number, group in enumerate(plan.forward_groups):
            if pending and not plan.staged:
                forward += [_Stage(OperationKind.UPDATE, (i,)) for i in group]
            if number == 0:
                forward.append(_Stage(OperationKind.EMBED, ()))
            forward.append(_Stage(OperationKind.FORWARD, group))
        backward: list[_Stage] = [_Stage(OperationKind.HEAD, ())]
        for group in plan.backward_groups:
            backward.append(_Stage(OperationKind.BACKWARD, group))
            if immediate:
                backward += [_Stage(OperationKind.UPDATE, (i,)) for i in reversed(group)]
        backward.append(_Stage(OperationKind.EMBED_BACKWARD, ()))
        if immediate:
            backward += [_Stage(OperationKind.UPDATE, (i,)) for i in (self.last, 0)]
        nearest = [_Stage(OperationKind.FORWARD, group) for group in plan.forward_groups]
        self._run(
            [*forward, *backward],
            [] if plan.staged else nearest,
            commit_after=len(forward) - 1 if pending else -1,
        )
        if immediate:
            self._commit()
        return Program(tuple(self.ops), self.slot_of)

    def flush(self) -> Program:
        self._run([_Stage(OperationKind.UPDATE, (i,)) for i in self.plan.update_order()], [])
        self._commit()
        return Program(tuple(self.ops), self.slot_of)

    # ---- stages ----------------------------------------------------------------------------------------------

    def _run(self, stages: list[_Stage], after: list[_Stage], commit_after: int = -1) -> None:
        """`after`: what the next program begins with, for foresight."""
        plan = self.plan
        updated = [stage.blocks[0] for stage in stages if stage.what is OperationKind.UPDATE]
        self.tiles = [
            (i, t) for i in updated if plan.uses_ring(i) for t in range(plan.tile_count(i))
        ]
        horizon = [*stages, *after]
        needs = [[i for i in stage.blocks if self._paged(stage, i)] for stage in horizon]
        first_update = next(
            (k for k, stage in enumerate(stages) if stage.what is OperationKind.UPDATE), None
        )
        for at, stage in enumerate(stages):
            if not (plan.staged and stage.what is OperationKind.UPDATE):
                self._page(needs, at)
            if first_update is not None and (
                at == first_update or (stage.what is OperationKind.HEAD and at < first_update)
            ):
                self._fetch(up_to=plan.ring)
            self._emit(stage)
            if at == commit_after:
                self._commit()

    def _paged(self, stage: _Stage, i: int) -> bool:
        """Whether a stage needs fragment i in a slot: blocks that have no buffer of their own where they are used."""
        if i in (0, self.last) or self.plan.weights[i] == "device":
            return False
        if self.plan.staged:
            return stage.what is not OperationKind.UPDATE  # those work where the master copy lies
        return self.plan.weights[i] == "disk"

    def _page(self, needs: list[list[int]], at: int) -> None:
        """Brings in what this stage needs, and ahead of time what the next ones do, as far as slots go."""

        def next_use(i: int) -> int:
            return next((k for k in range(at, len(needs)) if i in needs[k]), len(needs))

        for k in range(at, len(needs)):
            for i in needs[k]:
                if i in self.slot_of:
                    continue
                if not self.free:
                    victim = max(self.slot_of, key=next_use)
                    if next_use(victim) <= k:
                        assert k > at, f"{self.plan.slots} slots cannot hold what one stage needs"
                        return
                    self.free.append(self.slot_of.pop(victim))
                self._bring(i, self.free.pop(0))
            if k - at > len(needs[at]) + self.plan.slots:
                return

    def _bring(self, i: int, slot: int) -> None:
        plan, self.slot_of[i] = self.plan, slot
        from_disk = plan.weights[i] == "disk"
        if plan.staged:
            source: Resource = ("home", i)
            if from_disk:
                source = ("stage", i % plan.host_slots)
                self._add(
                    OperationKind.READ,
                    LaneName.READ,
                    (i,),
                    (i % plan.host_slots,),
                    uses=[("record", i)],
                    changes=[source],
                )
            self._add(
                OperationKind.LOAD,
                LaneName.IN,
                (i,),
                (slot,),
                uses=[source],
                changes=[("slot", slot)],
            )
        else:
            self._add(
                OperationKind.READ,
                LaneName.READ,
                (i,),
                (slot,),
                uses=[("record", i)],
                changes=[("slot", slot)],
            )

    def _emit(self, stage: _Stage) -> None:
        blocks = stage.blocks
        match stage.what:
            case OperationKind.EMBED:
                self._add(
                    OperationKind.EMBED,
                    LaneName.COMPUTE,
                    (0,),
                    uses=[self._end(0)],
                    changes=[("stream",)],
                )
            case OperationKind.FORWARD:
                uses = [self._weights(i) for i in blocks]
                self._add(
                    OperationKind.FORWARD,
                    LaneName.COMPUTE,
                    blocks,
                    self._slots(blocks),
                    uses=uses,
                    changes=[("stream",)],
                )
            case OperationKind.HEAD:
                ends = [self._end(0), self._end(self.last)]
                mine = [("stream",), ("head gradient",), ("gradient", "own", self.last)]
                self._add(
                    OperationKind.HEAD, LaneName.COMPUTE, (self.last,), uses=ends, changes=mine
                )
            case OperationKind.BACKWARD:
                self._backward(blocks)
            case OperationKind.EMBED_BACKWARD:
                mine = [("stream",), ("head gradient",), ("gradient", "own", 0)]
                self._add(OperationKind.EMBED_BACKWARD, LaneName.COMPUTE, (0,), changes=mine)
                for i in (self.last, 0):
                    self._finished(i, ("gradient", "own", i), -1)
            case OperationKind.UPDATE:
                self._update(blocks[0])
            case _:
                raise AssertionError(stage)

    def _backward(self, blocks: tuple[int, ...]) -> None:
        for i in blocks:
            self.gradient_of[i] = -1
            if not self.plan.has_gradient_buffer(i):
                self.gradient_of[i] = self.next_gradient % self.plan.gradient_slots
                self.next_gradient += 1
        slots = tuple(self.gradient_of[i] for i in blocks)
        gradients = [self._gradient(i) for i in blocks]
        self._add(
            OperationKind.BACKWARD, LaneName.COMPUTE, blocks, self._slots(blocks), slots,
            uses=[self._weights(i) for i in blocks], changes=[("stream",), *gradients],
        )  # fmt: skip
        for i in reversed(blocks):
            self._finished(i, self._gradient(i), self.gradient_of[i])

    def _finished(self, i: int, gradient: Resource, slot: int) -> None:
        """A fragment's gradient is whole: its norm is taken, and it goes where it waits for its update."""
        plan = self.plan
        self._add(
            OperationKind.NORM,
            LaneName.COMPUTE,
            (i,),
            gradients=(slot,),
            uses=[gradient],
            changes=[("norm", i)],
        )
        if plan.staged and plan.weights[i] != "device":
            self._add(
                OperationKind.OFFLOAD, LaneName.OUT, (i,), gradients=(slot,), uses=[gradient], changes=[self._host_gradient(i)]
            )  # fmt: skip
        if plan.spills_gradient(i):
            source = self._host_gradient(i) if plan.staged else gradient
            self._add(
                OperationKind.SPILL,
                LaneName.WRITE,
                (i,),
                gradients=(slot,),
                uses=[source],
                changes=[("spilled", i)],
            )

    def _update(self, i: int) -> None:
        plan = self.plan
        slot = self.slot_of.get(i, -1) if not plan.staged else -1
        weights = self._weights(i) if not plan.staged else ("home", i)
        lane = (
            LaneName.OPTIMIZER if plan.staged and plan.weights[i] != "device" else LaneName.COMPUTE
        )
        gradient_slot = self.gradient_of.get(i, -1)
        if plan.spills_gradient(i):
            gradient: Resource = ("ring gradient",)  # it comes with the tile
        elif plan.staged and plan.weights[i] != "device":
            gradient = self._host_gradient(i)
        else:
            gradient = self._gradient(i)
        common = {"slots": (slot,), "gradients": (gradient_slot,)}
        if plan.uses_ring(i):
            for t in range(plan.tile_count(i)):
                self._fetch(up_to=self.stored + 1)
                ring = ("ring", self.stored % plan.ring)
                number = self.stored % plan.ring
                uses = [("norm", i)] if plan.spills_gradient(i) else [("norm", i), gradient]
                self._add(
                    OperationKind.UPDATE,
                    lane,
                    (i,),
                    tile=t,
                    ring=number,
                    uses=uses,
                    changes=[weights, ring],
                    **common,
                )
                kept: list[Resource] = [("tile", i, t)]
                if plan.staged and plan.weights[i] == "disk":
                    kept.append(("record", i))
                self._add(
                    OperationKind.STORE,
                    LaneName.WRITE,
                    (i,),
                    tile=t,
                    ring=number,
                    uses=[ring],
                    changes=kept,
                )
                self.stored += 1
                self._fetch(up_to=self.stored + plan.ring)
        else:
            moments = ("moments", i)
            self._add(
                OperationKind.UPDATE, lane, (i,), uses=[("norm", i), gradient], changes=[weights, moments], **common
            )  # fmt: skip
            if plan.writes_moments(i):
                self._add(
                    OperationKind.STORE,
                    LaneName.WRITE,
                    (i,),
                    uses=[moments],
                    changes=[("tile", i, 0)],
                )
        if plan.writes_weights(i) and not (
            plan.staged and plan.weights[i] == "disk"
        ):  # those went with their tiles
            self._add(
                OperationKind.WRITE,
                LaneName.WRITE,
                (i,),
                (slot,),
                uses=[weights],
                changes=[("record", i)],
            )
        if not plan.staged or plan.weights[i] == "device":
            return
        if i in (0, self.last):
            self._add(
                OperationKind.LOAD, LaneName.IN, (i,), (-1,), uses=[weights], changes=[("end", i)]
            )
        elif i in self.slot_of:  # the device's copy is of yesterday
            self.free.append(self.slot_of.pop(i))

    def _fetch(self, up_to: int) -> None:
        plan = self.plan
        while self.fetched < min(up_to, len(self.tiles)):
            i, t = self.tiles[self.fetched]
            ring = self.fetched % plan.ring
            uses: list[Resource] = [("tile", i, t)]
            if plan.spills_gradient(i):
                uses.append(("spilled", i))
            self._add(
                OperationKind.FETCH,
                LaneName.READ,
                (i,),
                tile=t,
                ring=ring,
                uses=uses,
                changes=[("ring", ring)],
            )
            self.fetched += 1

    def _commit(self) -> None:
        if self.plan.commits_steps:
            self._add(OperationKind.COMMIT, LaneName.WRITE, changes=[("manifest",)])

    # ---- names -----------------------------------------------------------------------------------------------

    def _weights(self, i: int) -> Resource:
        return ("slot", self.slot_of[i]) if i in self.slot_of else ("home", i)

    def _end(self, i: int) -> Resource:
        """The embedding and the final norm are used at both ends of a pass: they stay where the blocks compute."""
        return ("end", i) if self.plan.staged and self.plan.weights[i] != "device" else ("home", i)

    def _slots(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.slot_of.get(i, -1) for i in blocks)

    def _gradient(self, i: int) -> Resource:
        slot = self.gradient_of.get(i, -1)
        return ("gradient", "own", i) if slot < 0 else ("gradient", "pool", slot)

    def _host_gradient(self, i: int) -> Resource:
        ends = i in (0, self.last)
        return (
            ("host gradient", "end", i)
            if ends
            else ("host gradient", self.plan.host_gradient_slot(i))
        )

    def _add(
        self,
        kind: OperationKind,
        lane: LaneName,
        blocks: tuple[int, ...] = (),
        slots: tuple[int, ...] = (),
        gradients: tuple[int, ...] = (),
        tile: int = -1,
        ring: int = -1,
        uses: Iterable[Resource] = (),
        changes: Iterable[Resource] = (),
    ) -> None:
        self.ops.append(
            Operation(kind, lane, blocks, slots, gradients, tile, ring, tuple(uses), tuple(changes))
        )
