"""Turn a plan into the ordered list of operations of one step of a swapped model.

Pure. The order is *vertical*: every micro-batch passes a group of blocks before the next group is
touched, so that weights travel twice per step and not twice per micro-batch. The list is a correct
sequential program. It also defines what may overlap: each operation names the buffers that it reads
and changes, runs on one lane, and waits for the earlier operations that touch the same buffers
(`Hazards`). The engine runs the list by these rules, and `simulator.py` predicts with them.

With several devices over one host copy, each has the operations that copy and compute, with lanes
and buffers of its own, and the same blocks in its slots. What the others add to a gradient is
summed on the host in the order of the devices, whichever is ready first. The first device's
computation comes last in each stage: the thread that submits the list computes it.

The future uses of all blocks are known, so paging is optimal (Belady 1966): a buffer is taken from
the block whose next use is farthest. The last blocks of forward are therefore still in memory when
backward begins.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Generic, TypeVar

from barnraise.planning.plan import Plan


class OperationKind(StrEnum):
    """Name what an operation does."""

    READ = "read"  # a block's weights: disk → memory
    LOAD = "load"  # a fragment's weights: memory → device
    EMBED = "embed"  # tokens → the first block's inputs
    FORWARD = "forward"  # all micro-batches through a group
    HEAD = "head"  # losses, and their gradients with respect to the last block's outputs
    BACKWARD = "backward"  # all micro-batches back through a group; leaves its gradients
    EMBED_BACKWARD = "embed backward"  # also adds the two gradients of the tied table
    NORM = "norm"  # the norm of one fragment's gradient
    OFFLOAD = "offload"  # a gradient: device → memory
    ADD = "add"  # the other devices' parts of a gradient, in their order, to the first one's
    SPILL = "spill"  # a gradient: memory → disk
    FETCH = "fetch"  # the parts of a tile that an update needs and memory lacks: disk → ring
    UPDATE = "update"  # AdamW on a fragment or a tile of it, with the updates of other machines
    STORE = "store"  # a tile: ring → disk, or a fragment's moments: memory → disk
    WRITE = "write"  # a block's weights: memory → disk
    COMMIT = "commit"  # makes what is on disk the current state


class LaneName(StrEnum):
    """Name a resource that executes one operation at a time."""

    COMPUTE = "compute"
    IN = "copy in"
    OUT = "copy out"
    OPTIMIZER = "optimizer"
    READ = "disk read"
    WRITE = "disk write"


# The lanes of the operations that move bytes. All others compute.
MOVING_LANES = {
    OperationKind.READ: LaneName.READ,
    OperationKind.FETCH: LaneName.READ,
    OperationKind.LOAD: LaneName.IN,
    OperationKind.OFFLOAD: LaneName.OUT,
    OperationKind.SPILL: LaneName.WRITE,
    OperationKind.STORE: LaneName.WRITE,
    OperationKind.WRITE: LaneName.WRITE,
    OperationKind.COMMIT: LaneName.WRITE,
}

ADDED_SLOTS = 2  # buffers in RAM for blocks' gradients of each device but the first

Resource = tuple[str | int, ...]  # a buffer's name: ("slot", 2), ("ring", 0), ("tile", 7, 1)
Resources = tuple[Resource, ...]
Token = TypeVar("Token")


@dataclass(frozen=True)
class Operation:
    """Describe one operation: what it does to which fragments, and the buffers it touches."""

    kind: OperationKind
    lane: LaneName
    blocks: tuple[int, ...] = ()  # indices of fragments
    slots: tuple[int, ...] = ()  # the slot of each one's weights; -1 is the fragment's own buffer
    gradients: tuple[int, ...] = ()  # the same for gradients
    tile: int = -1  # -1 is the whole fragment
    ring_slot: int = -1  # the buffer of the ring; -1 is none
    device: int = 0  # the number of the device that copies or computes
    uses: tuple[Resource, ...] = ()
    changes: tuple[Resource, ...] = ()

    def __str__(self) -> str:
        tile = f" tile {self.tile}" if self.tile >= 0 else ""
        device = f" on device {self.device}" if self.device else ""
        return f"{self.kind} {','.join(map(str, self.blocks))}{tile}{device}".strip()


@dataclass(frozen=True)
class Program:
    """List operations in order, and map each paged block to its slot after them."""

    operations: tuple[Operation, ...]
    cached: Mapping[int, int] = field(default_factory=dict[int, int])


class Hazards(Generic[Token]):
    """Find the earlier operations that each operation must wait for.

    An operation waits for the last change of each buffer that it uses, and for the last change and
    all later uses of each buffer that it changes. Tokens represent operations: events in the
    engine. Tokens are compared by identity. The simulator's `Timeline` follows the same rule.
    """

    def __init__(self) -> None:
        self._changed: dict[Resource, Token] = {}
        self._used: dict[Resource, list[Token]] = {}

    def dependencies(self, op: Operation) -> list[Token]:
        """Return the tokens of the recorded operations that `op` must wait for."""
        by_identity: dict[int, Token] = {}
        for resource in op.uses:
            token = self._changed.get(resource)
            if token is not None:
                by_identity[id(token)] = token
        for resource in op.changes:
            for token in (*self._used.get(resource, ()), self._changed.get(resource)):
                if token is not None:
                    by_identity[id(token)] = token
        return list(by_identity.values())

    def record(self, op: Operation, token: Token) -> None:
        """Record that `op`, represented by `token`, comes next."""
        for resource in op.uses:
            if resource not in op.changes:
                self._used.setdefault(resource, []).append(token)
        for resource in op.changes:
            self._changed[resource] = token
            self._used[resource] = []


def step_program(
    plan: Plan, pending: bool = False, cached: Mapping[int, int] | None = None
) -> Program:
    """Return the program of one optimizer step.

    With `pending` the updates of the previous step run during its forward: exact clipping waits for
    the last gradient. `cached` maps each block that earlier programs left in a slot to that slot.
    """
    return _Writer(plan, cached or {}).step(pending)


def flush_program(plan: Plan, cached: Mapping[int, int] | None = None) -> Program:
    """Return the program of the pending updates alone; see `step_program`."""
    return _Writer(plan, cached or {}).flush()


@dataclass(frozen=True)
class _Stage:
    """Describe a part of a program that needs some blocks in slots."""

    kind: OperationKind
    blocks: tuple[int, ...]


def _update_stages(blocks: Iterable[int]) -> list[_Stage]:
    return [_Stage(OperationKind.UPDATE, (i,)) for i in blocks]


class _Writer:
    """Write one program and record the block that each slot holds."""

    def __init__(self, plan: Plan, cached: Mapping[int, int]) -> None:
        plan.validate()
        self.plan = plan
        self.ops: list[Operation] = []
        self.slot_of = dict(cached)
        self.free = [s for s in range(plan.slots) if s not in self.slot_of.values()]
        self.gradient_of: dict[int, int] = {}
        self.next_gradient = 0
        self.last = len(plan.weights) - 1
        self.devices = range(len(plan.device_plans) - 1, -1, -1)  # the first one comes last
        # All (fragment, tile) that pass through the ring, in order of use.
        self.tiles: list[tuple[int, int]] = []
        self.fetched = 0  # tiles requested so far
        self.stored = 0  # tiles updated and stored so far

    # ---- programs ----

    def step(self, pending: bool) -> Program:
        """Write the program of a step; see `step_program`."""
        plan = self.plan
        immediate = plan.clipping != "exact"
        forward = self._forward_stages(pending)
        next_forward = [_Stage(OperationKind.FORWARD, group) for group in plan.forward_groups]
        self._run(
            [*forward, *self._backward_stages(immediate)],
            next_forward if immediate or not plan.staged else [],
            commit_after=len(forward) - 1 if pending else -1,
        )
        if immediate:
            self._commit()
        return Program(tuple(self.ops), self.slot_of)

    def _forward_stages(self, pending: bool) -> list[_Stage]:
        """List the stages of a forward, with the pending updates before the uses of the weights."""
        plan = self.plan
        stages: list[_Stage] = []
        if pending and plan.staged:
            stages += _update_stages(plan.update_order())
        elif pending:
            stages += _update_stages(plan.ends)
        for number, group in enumerate(plan.forward_groups):
            if pending and not plan.staged:
                stages += _update_stages(group)
            if number == 0 and plan.ends:
                stages.append(_Stage(OperationKind.EMBED, ()))
            stages.append(_Stage(OperationKind.FORWARD, group))
        return stages

    def _backward_stages(self, immediate: bool) -> list[_Stage]:
        """List the stages of a backward; `immediate` updates follow the gradients of each group."""
        ends = self.plan.ends
        stages = [_Stage(OperationKind.HEAD, ())] if ends else []
        for group in self.plan.backward_groups:
            stages.append(_Stage(OperationKind.BACKWARD, group))
            if immediate:
                stages += _update_stages(reversed(group))
        if ends:
            stages.append(_Stage(OperationKind.EMBED_BACKWARD, ()))
        if immediate:
            stages += _update_stages(reversed(ends))
        return stages

    def flush(self) -> Program:
        """Write the program of the pending updates alone."""
        self._run(_update_stages(self.plan.update_order()), [])
        self._commit()
        return Program(tuple(self.ops), self.slot_of)

    # ---- stages ----

    def _run(self, stages: list[_Stage], after: list[_Stage], commit_after: int = -1) -> None:
        """Write the operations of the stages.

        Args:
            stages: the stages of this program.
            after: the stages with which the next program begins, for paging; with a device of its
                own their first blocks are loaded at the end.
            commit_after: the index of the stage that a commit follows; -1 for none.
        """
        plan = self.plan
        updated = [stage.blocks[0] for stage in stages if stage.kind is OperationKind.UPDATE]
        self.tiles = [
            (i, t) for i in updated if plan.uses_ring(i) for t in range(plan.tile_count(i))
        ]
        needs = self._list_needs([*stages, *after] if not plan.staged else stages)
        first_update = next(
            (k for k, stage in enumerate(stages) if stage.kind is OperationKind.UPDATE), None
        )
        for at, stage in enumerate(stages):
            if not (plan.staged and stage.kind is OperationKind.UPDATE):
                self._load_ahead(needs, at)
            if first_update is not None and (
                at == first_update or (stage.kind is OperationKind.HEAD and at < first_update)
            ):
                self._fetch(up_to=plan.ring)
            self._emit(stage)
            if at == commit_after:
                self._commit()
        if after and plan.staged:
            # These loads wait for updates: nothing that this step needs may queue behind them.
            self._load_ahead(self._list_needs(after), 0)

    def _list_needs(self, stages: list[_Stage]) -> list[list[int]]:
        """List the blocks that each stage needs in slots."""
        return [[i for i in stage.blocks if self._needs_slot(stage, i)] for stage in stages]

    def _needs_slot(self, stage: _Stage, i: int) -> bool:
        """Whether a stage needs fragment i in a slot, because it has no buffer of its own there."""
        if i in (0, self.last) or self.plan.weights[i] == "device":
            return False
        if self.plan.staged:
            # Updates work where the master copy lies.
            return stage.kind is not OperationKind.UPDATE
        return self.plan.weights[i] == "disk"

    def _load_ahead(self, needs: list[list[int]], at: int) -> None:
        """Load the blocks that stage `at` needs, then those of later stages while slots suffice."""

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
                self._load(i, self.free.pop(0))
            if k - at > len(needs[at]) + self.plan.slots:
                return

    def _load(self, i: int, slot: int) -> None:
        """Load the weights of block i into a slot."""
        plan = self.plan
        self.slot_of[i] = slot
        if not plan.staged:
            self._read(i, slot, ("slot", slot))
            return
        source: Resource = ("home", i)
        if plan.weights[i] == "disk":
            host_slot = i % plan.host_slots
            source = ("stage", host_slot)
            self._read(i, host_slot, source)
        self._load_everywhere(i, slot, source, ("slot", slot))

    def _load_everywhere(self, i: int, slot: int, source: Resource, target: Resource) -> None:
        """Copy weights in memory to each device."""
        for device in self.devices:
            targets = (_on(device, target),)
            self._append(
                OperationKind.LOAD, (i,), device, slots=(slot,), uses=(source,), changes=targets
            )

    def _read(self, i: int, slot: int, target: Resource) -> None:
        """Read the weights of block i from disk."""
        self._append(
            OperationKind.READ, (i,), slots=(slot,), uses=(("record", i),), changes=(target,)
        )

    def _append(
        self, kind: OperationKind, blocks: tuple[int, ...] = (), device: int = 0, **fields: Any
    ) -> None:
        """Append an operation on its kind's lane; `fields` are further ones of it, or that lane."""
        lane = fields.pop("lane", MOVING_LANES.get(kind, LaneName.COMPUTE))
        self.ops.append(Operation(kind, lane, blocks, device=device, **fields))

    def _compute(
        self, kind: OperationKind, blocks: tuple[int, ...], uses: Resources, changes: Resources
    ) -> None:
        """Append a computation of each device on its own micro-batches and buffers."""
        is_backward = kind is OperationKind.BACKWARD
        has_slots = is_backward or kind is OperationKind.FORWARD
        for device in self.devices:
            self._append(
                kind,
                blocks,
                device,
                slots=self._slots_of(blocks) if has_slots else (),
                gradients=tuple(self.gradient_of[i] for i in blocks) if is_backward else (),
                uses=tuple(_on(device, resource) for resource in uses),
                changes=tuple(_on(device, resource) for resource in (("stream",), *changes)),
            )

    def _emit(self, stage: _Stage) -> None:
        blocks = stage.blocks
        match stage.kind:
            case OperationKind.EMBED:
                self._compute(stage.kind, (0,), (self._end(0),), ())
            case OperationKind.FORWARD:
                self._compute(stage.kind, blocks, tuple(map(self._weights_of, blocks)), ())
            case OperationKind.HEAD:
                ends = (self._end(0), self._end(self.last))
                gradients = (("head gradient",), ("gradient", "own", self.last))
                self._compute(stage.kind, (self.last,), ends, gradients)
            case OperationKind.BACKWARD:
                self._backward(blocks)
            case OperationKind.EMBED_BACKWARD:
                self._compute(stage.kind, (0,), (), (("head gradient",), ("gradient", "own", 0)))
                for i in (self.last, 0):
                    self._finish_gradient(i, ("gradient", "own", i), -1)
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
        weights, gradients = map(self._weights_of, blocks), map(self._gradient_of, blocks)
        self._compute(OperationKind.BACKWARD, blocks, tuple(weights), tuple(gradients))
        for i in reversed(blocks):
            self._finish_gradient(i, self._gradient_of(i), self.gradient_of[i])

    def _finish_gradient(self, i: int, gradient: Resource, slot: int) -> None:
        """Compute the norm of a complete gradient and move it to where it waits for its update.

        Several devices' parts are added there in their order, and have one norm.
        """
        plan = self.plan
        moves = plan.moves_gradient(i)
        norm: dict[str, Any] = dict(gradients=(slot,), changes=(("norm", i),))
        if not plan.devices:
            self._append(OperationKind.NORM, (i,), uses=(gradient,), **norm)
        for device in self.devices if moves else ():
            self._append(
                OperationKind.OFFLOAD,
                (i,),
                device,
                gradients=(slot,),
                uses=(_on(device, gradient),),
                changes=(self._offloaded(i, device),),
            )
        if plan.devices:
            parts = tuple(self._offloaded(i, device) for device in reversed(self.devices))
            self._append(
                OperationKind.ADD, (i,), lane=LaneName.OPTIMIZER, uses=parts, changes=parts[:1]
            )
            self._append(OperationKind.NORM, (i,), lane=LaneName.OPTIMIZER, uses=parts[:1], **norm)
        if plan.spills_gradient(i):
            source = self._host_gradient(i) if plan.staged else gradient
            self._append(
                OperationKind.SPILL,
                (i,),
                gradients=(slot,),
                uses=(source,),
                changes=(("spilled", i),),
            )

    # ---- updates ----

    def _update(self, i: int) -> None:
        """Update fragment i, write what belongs on disk, and refresh the device's copy."""
        plan = self.plan
        lies_on_host = plan.staged and plan.weights[i] != "device"
        updated_on_host = lies_on_host and not plan.updates_on_device(i)
        weights = ("home", i) if plan.staged else self._weights_of(i)
        norms = (i,) if plan.clipping == "exact" else plan.norms_of(i)
        update = Operation(
            OperationKind.UPDATE,
            LaneName.OPTIMIZER if updated_on_host else LaneName.COMPUTE,
            (i,),
            (-1 if plan.staged else self.slot_of.get(i, -1),),
            (self.gradient_of.get(i, -1),),
            uses=(*(("norm", k) for k in norms), *self._waiting_gradient(i)),
            changes=(weights,),
        )
        if plan.uses_ring(i):
            self._update_tiles(i, update)
        else:
            self._update_whole(i, update)
        # Weights that pass through the ring were stored with their tiles.
        stored_with_tiles = plan.staged and plan.weights[i] == "disk"
        if plan.writes_weights(i) and not stored_with_tiles:
            self._append(
                OperationKind.WRITE,
                (i,),
                slots=update.slots,
                uses=(weights,),
                changes=(("record", i),),
            )
        if not lies_on_host:
            return
        if i in (0, self.last):
            self._load_everywhere(i, -1, weights, ("end", i))
        elif i in self.slot_of:
            # The device's copy is from before the update.
            self.free.append(self.slot_of.pop(i))

    def _waiting_gradient(self, i: int) -> tuple[Resource, ...]:
        """Name the buffer where a gradient waits; a spilled one comes with the tiles instead."""
        plan = self.plan
        if plan.spills_gradient(i):
            return ()
        return (self._host_gradient(i) if plan.moves_gradient(i) else self._gradient_of(i),)

    def _update_tiles(self, i: int, update: Operation) -> None:
        """Update fragment i tile by tile through the ring."""
        plan = self.plan
        for t in range(plan.tile_count(i)):
            self._fetch(up_to=self.stored + 1)
            ring_slot = self.stored % plan.ring
            ring: Resource = ("ring", ring_slot)
            self.ops.append(
                replace(update, tile=t, ring_slot=ring_slot, changes=(*update.changes, ring))
            )
            stored: list[Resource] = [("tile", i, t)]
            if plan.staged and plan.weights[i] == "disk":
                stored.append(("record", i))
            self._append(
                OperationKind.STORE,
                (i,),
                tile=t,
                ring_slot=ring_slot,
                uses=(ring,),
                changes=tuple(stored),
            )
            self.stored += 1
            self._fetch(up_to=self.stored + plan.ring)

    def _update_whole(self, i: int, update: Operation) -> None:
        """Update fragment i at once, with moments that memory holds."""
        moments: Resource = ("moments", i)
        self.ops.append(replace(update, changes=(*update.changes, moments)))
        if self.plan.writes_moments(i):
            self._append(OperationKind.STORE, (i,), uses=(moments,), changes=(("tile", i, 0),))

    def _fetch(self, up_to: int) -> None:
        """Fetch tiles into the ring until `up_to` of them have been requested."""
        plan = self.plan
        while self.fetched < min(up_to, len(self.tiles)):
            i, t = self.tiles[self.fetched]
            ring_slot = self.fetched % plan.ring
            uses: list[Resource] = [("tile", i, t)]
            if plan.spills_gradient(i):
                uses.append(("spilled", i))
            self._append(
                OperationKind.FETCH,
                (i,),
                tile=t,
                ring_slot=ring_slot,
                uses=tuple(uses),
                changes=(("ring", ring_slot),),
            )
            self.fetched += 1

    def _commit(self) -> None:
        if self.plan.commits_steps:
            self._append(OperationKind.COMMIT, changes=(("manifest",)))

    # ---- names of buffers ----

    def _weights_of(self, i: int) -> Resource:
        return ("slot", self.slot_of[i]) if i in self.slot_of else ("home", i)

    def _end(self, i: int) -> Resource:
        """Name the buffer of the embedding or the final norm that computations use.

        Both are used at both ends of a pass, so they stay where the blocks compute.
        """
        return ("end", i) if self.plan.staged and self.plan.weights[i] != "device" else ("home", i)

    def _slots_of(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.slot_of.get(i, -1) for i in blocks)

    def _gradient_of(self, i: int) -> Resource:
        slot = self.gradient_of.get(i, -1)
        return ("gradient", "own", i) if slot < 0 else ("gradient", "pool", slot)

    def _host_gradient(self, i: int) -> Resource:
        if i in (0, self.last):
            return ("host gradient", "end", i)
        return ("host gradient", self.plan.host_gradient_slot(i))

    def _offloaded(self, i: int, device: int) -> Resource:
        """Name the buffer in memory to which a device's part of a gradient goes."""
        if device == 0:
            return self._host_gradient(i)
        place = ("end", i) if i in (0, self.last) else (i % ADDED_SLOTS,)
        return ("added gradient", device, *place)


def _on(device: int, resource: Resource) -> Resource:
    """Name a device's own buffer of a kind that all devices have; what memory holds they share."""
    return (*resource, "device", device) if device and resource[0] != "home" else resource
