"""Programs of arbitrary plans are correct, executed on buffers that record only their contents."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from helpers.effort import examples
from helpers.worker.plans import (
    arbitrary_plans,
    from_disk,
    plans_of_several_devices,
    resident,
    stage_plans,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.planning import program as program_module
from barnraise.planning.plan import Plan
from barnraise.planning.program import ADDED_SLOTS, Hazards, LaneName, Operation, OperationKind
from barnraise.spec import MUON, ModelSpec

STEPS = 3
COMPUTING = {
    OperationKind.EMBED,
    OperationKind.FORWARD,
    OperationKind.HEAD,
    OperationKind.BACKWARD,
    OperationKind.EMBED_BACKWARD,
}


def programs_of(plan: Plan) -> list[tuple[str, tuple[Operation, ...]]]:
    """Return what the engine runs for STEPS steps and a flush: ("step" or "flush", operations)."""
    programs, cached, pending = [], {}, False
    for _ in range(STEPS):
        program = program_module.step_program(plan, pending=pending, cached=cached)
        programs.append(("step", program.operations))
        cached, pending = program.cached, plan.clipping == "exact"
        if pending and not plan.defers_updates:
            program = program_module.flush_program(plan, cached=cached)
            programs.append(("flush", program.operations))
            cached, pending = program.cached, False
    if pending:
        programs.append(("flush", program_module.flush_program(plan, cached=cached).operations))
    return programs


@dataclass(frozen=True)
class NumberedOperation:
    """An operation with the numbers that its effects are checked against.

    Attributes:
        operation: The operation.
        step: The step whose gradients it computes.
        updates: The updates that the weights it computes with must contain.
        update_step: The step whose updates it makes.
    """

    operation: Operation
    step: int
    updates: int
    update_step: int


def numbered_operations(plan: Plan) -> list[NumberedOperation]:
    """Return the operations of all programs of a plan, in order."""
    numbered, steps, updates = [], 0, 0
    for name, operations in programs_of(plan):
        is_step = name == "step"
        has_updates = any(op.kind is OperationKind.UPDATE for op in operations)
        updates_during_backward = is_step and plan.clipping != "exact"
        seen = updates + (1 if has_updates and not updates_during_backward else 0)
        numbered += [NumberedOperation(op, steps, seen, updates) for op in operations]
        updates += has_updates
        steps += is_step
    return numbered


@dataclass
class RingTile:
    """What a buffer of the ring contains: the versions of one tile's state, and its gradient."""

    tile: tuple[int, int]  # fragment, tile
    moments: int
    weights: int
    gradient: tuple[int, int] | None


class BufferModel:
    """Executes operations on buffers that contain versions instead of values.

    Weights and moments are (fragment, the number of updates of each tile); a gradient is (fragment,
    step). What an operation touches follows from `buffers.py`, not from what the operation states.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.weights: dict[tuple, tuple] = {}  # by buffer
        self.moments: dict[tuple, tuple] = {}
        for i in plan.local_fragments:
            fresh = (i, (0,) * plan.tile_count(i))
            ends = (("end", i, device) for device in range(len(plan.device_plans)))
            for buffer in (("home", i), ("record", i), *ends):
                self.weights[buffer] = fresh
            self.moments["home", i] = self.moments["record", i] = fresh
        self.gradients: dict[tuple, tuple] = {}
        self.ring: dict[int, RingTile] = {}
        self.norms: dict[int, set[int]] = defaultdict(set)  # step → fragments
        self.updated: Counter = Counter()
        self.committed: list[int] = []
        self._methods: dict[OperationKind, Callable[[NumberedOperation], None]] = {
            OperationKind.READ: self._read,
            OperationKind.LOAD: self._load,
            OperationKind.EMBED: self._embed,
            OperationKind.FORWARD: self._forward,
            OperationKind.HEAD: self._head,
            OperationKind.BACKWARD: self._backward,
            OperationKind.EMBED_BACKWARD: self._embed_backward,
            OperationKind.NORM: self._norm,
            OperationKind.OFFLOAD: self._offload,
            OperationKind.ADD: self._add,
            OperationKind.SPILL: self._spill,
            OperationKind.FETCH: self._fetch,
            OperationKind.UPDATE: self._update,
            OperationKind.STORE: self._store,
            OperationKind.WRITE: self._write,
            OperationKind.COMMIT: self._commit,
        }

    def execute(self, numbered: NumberedOperation) -> None:
        """Execute one operation, and fail if a buffer does not contain what it needs."""
        self._methods[numbered.operation.kind](numbered)

    def _computing_buffer(self, op: Operation, i: int, slot: int) -> tuple:
        """Return the buffer of fragment i's weights during a device's forward and backward."""
        if slot >= 0:
            return ("slot", slot, op.device) if self.plan.staged else ("slot", slot)
        is_end = i in (0, self.plan.last_fragment)
        return ("end", i, op.device) if is_end and self._is_copied_to_device(i) else ("home", i)

    def _is_copied_to_device(self, i: int) -> bool:
        return self.plan.staged and self.plan.weights[i] != "device"

    def _check_weights(self, numbered: NumberedOperation, i: int, slot: int) -> None:
        contents = self.weights.get(self._computing_buffer(numbered.operation, i, slot))
        updates = numbered.updates
        assert contents == (i, (updates,) * self.plan.tile_count(i)), (
            f"{i} is computed with {contents} after {updates} updates"
        )

    def _gradient_buffer(self, op: Operation, i: int, slot: int) -> tuple:
        return ("pool", slot, op.device) if slot >= 0 else ("own", i, op.device)

    def _host_gradient_buffer(self, i: int, device: int = 0) -> tuple:
        if i in (0, self.plan.last_fragment):
            return ("end", i, device)
        if device:
            return ("added", i % ADDED_SLOTS, device)
        return ("host", self.plan.host_gradient_slot(i))

    def _read(self, numbered: NumberedOperation) -> None:
        op = numbered.operation
        target = "stage" if self.plan.staged else "slot"
        self.weights[target, op.slots[0]] = self.weights["record", op.blocks[0]]

    def _load(self, numbered: NumberedOperation) -> None:
        op = numbered.operation
        i = op.blocks[0]
        on_disk = self.plan.weights[i] == "disk"
        source = ("stage", i % self.plan.host_slots) if on_disk else ("home", i)
        self.weights[self._computing_buffer(op, i, op.slots[0])] = self.weights[source]

    def _embed(self, numbered: NumberedOperation) -> None:
        self._check_weights(numbered, 0, -1)

    def _forward(self, numbered: NumberedOperation) -> None:
        op = numbered.operation
        for block, slot in zip(op.blocks, op.slots, strict=True):
            self._check_weights(numbered, block, slot)

    def _head(self, numbered: NumberedOperation) -> None:
        last = self.plan.last_fragment
        self._check_weights(numbered, 0, -1)
        self._check_weights(numbered, last, -1)
        self.gradients["own", last, numbered.operation.device] = (last, numbered.step)

    def _backward(self, numbered: NumberedOperation) -> None:
        op = numbered.operation
        pooled = [slot for slot in op.gradients if slot >= 0]
        assert len(set(pooled)) == len(pooled)
        for block, slot, gradient in zip(op.blocks, op.slots, op.gradients, strict=True):
            self._check_weights(numbered, block, slot)
            self.gradients[self._gradient_buffer(op, block, gradient)] = (block, numbered.step)

    def _embed_backward(self, numbered: NumberedOperation) -> None:
        self.gradients["own", 0, numbered.operation.device] = (0, numbered.step)

    def _norm(self, numbered: NumberedOperation) -> None:
        op = numbered.operation
        i = op.blocks[0]
        buffer = self._gradient_buffer(op, i, op.gradients[0])
        if self.plan.devices:
            buffer = self._host_gradient_buffer(i)
        assert self.gradients[buffer] == self._whole(i, numbered.step)
        self.norms[numbered.step].add(i)

    def _offload(self, numbered: NumberedOperation) -> None:
        op = numbered.operation
        i = op.blocks[0]
        source = self._gradient_buffer(op, i, op.gradients[0])
        self.gradients[self._host_gradient_buffer(i, op.device)] = self.gradients[source]

    def _add(self, numbered: NumberedOperation) -> None:
        i = numbered.operation.blocks[0]
        for device in range(len(self.plan.devices)):
            assert self.gradients[self._host_gradient_buffer(i, device)] == (i, numbered.step)
        self.gradients[self._host_gradient_buffer(i)] = self._whole(i, numbered.step)

    def _whole(self, i: int, step: int) -> tuple:
        """Return a complete gradient, to which all of several devices have added."""
        return (i, step, "of all devices") if self.plan.devices else (i, step)

    def _spill(self, numbered: NumberedOperation) -> None:
        op = numbered.operation
        i = op.blocks[0]
        if self.plan.staged:
            source = self._host_gradient_buffer(i)
        else:
            source = self._gradient_buffer(op, i, op.gradients[0])
        self.gradients["spilled", i] = self.gradients[source]

    def _fetch(self, numbered: NumberedOperation) -> None:
        op = numbered.operation
        i = op.blocks[0]
        self.ring[op.ring_slot] = RingTile(
            tile=(i, op.tile),
            moments=self.moments["record", i][1][op.tile],
            weights=self.weights["record", i][1][op.tile],
            gradient=self.gradients.get(("spilled", i)),
        )

    def _write(self, numbered: NumberedOperation) -> None:
        op = numbered.operation
        i = op.blocks[0]
        on_disk = self.plan.weights[i] == "disk"
        source = ("slot", op.slots[0]) if on_disk else ("home", i)
        self.weights["record", i] = self.weights[source]

    def _commit(self, numbered: NumberedOperation) -> None:
        self.committed.append(numbered.update_step)
        for block in self.plan.local_fragments:
            updated = (block, (numbered.update_step + 1,) * self.plan.tile_count(block))
            assert self.weights["record", block] == self.moments["record", block] == updated

    def _update(self, numbered: NumberedOperation) -> None:
        op, step = numbered.operation, numbered.update_step
        i = op.blocks[0]
        is_end_of_muon = self.plan.optimizer == MUON and i in self.plan.ends
        if self.plan.clipping == "exact" or is_end_of_muon:
            assert self.norms[step] == set(self.plan.local_fragments), (
                "the clipped norm is that of the whole gradient"
            )
        assert i in self.norms[step]
        for tile in [op.tile] if op.tile >= 0 else range(self.plan.tile_count(i)):
            self._update_tile(op, tile, step)
            self.updated[i, tile] += 1

    def _update_tile(self, op: Operation, tile: int, step: int) -> None:
        plan, i, (slot,) = self.plan, op.blocks[0], op.slots
        ring_tile = self.ring[op.ring_slot] if op.ring_slot >= 0 else None
        assert ring_tile is None or ring_tile.tile == (i, tile)
        gradient = self._gradient_of_update(op, ring_tile)
        assert gradient == self._whole(i, step), f"{op} of step {step} uses the gradient {gradient}"
        if ring_tile:
            assert ring_tile.moments == step
            ring_tile.moments += 1
        else:
            self.moments["home", i] = self._with_update(self.moments["home", i], i, tile, step)
        if ring_tile and plan.staged and plan.weights[i] == "disk":
            assert ring_tile.weights == step
            ring_tile.weights += 1
        else:
            buffer = ("slot", slot) if slot >= 0 else ("home", i)
            self.weights[buffer] = self._with_update(self.weights[buffer], i, tile, step)

    def _gradient_of_update(self, op: Operation, ring_tile: RingTile | None) -> tuple | None:
        i, (gradient_slot,) = op.blocks[0], op.gradients
        if ring_tile and self.plan.spills_gradient(i):
            return ring_tile.gradient
        if self.plan.moves_gradient(i):
            return self.gradients[self._host_gradient_buffer(i)]
        return self.gradients[self._gradient_buffer(op, i, gradient_slot)]

    @staticmethod
    def _with_update(contents: tuple, i: int, tile: int, version: int) -> tuple:
        """Return a buffer's contents after the update of one tile."""
        fragment, versions = contents
        assert fragment == i and versions[tile] == version, (
            f"tile {tile} of {i} is updated in {contents} for step {version}"
        )
        return i, (*versions[:tile], version + 1, *versions[tile + 1 :])

    def _store(self, numbered: NumberedOperation) -> None:
        op = numbered.operation
        i = op.blocks[0]
        if op.ring_slot < 0:
            self.moments["record", i] = self.moments["home", i]
            return
        ring_tile = self.ring[op.ring_slot]
        assert ring_tile.tile == (i, op.tile)
        self._store_tile(self.moments, i, op.tile, ring_tile.moments)
        if self.plan.staged and self.plan.weights[i] == "disk":
            self._store_tile(self.weights, i, op.tile, ring_tile.weights)

    @staticmethod
    def _store_tile(buffers: dict[tuple, tuple], i: int, tile: int, version: int) -> None:
        versions = buffers["record", i][1]
        buffers["record", i] = (i, (*versions[:tile], version, *versions[tile + 1 :]))


class Token(int):
    """The number of an operation; `Hazards` distinguishes tokens by identity."""


def dependencies_of(programs: list[tuple[Operation, ...]]) -> list[set[int]]:
    """Return the operations that each operation of all programs waits for.

    Each lane works in its own order, except the optimizer's, which starts whatever is ready. A
    program starts after the first device's computations of those before it, and after the losses
    and norms of all devices, which the engine reads.
    """
    hazards, dependencies, newest_of_lane, read = Hazards(), [], {}, []
    for operations in programs:
        before = {*read, newest_of_lane.get((LaneName.COMPUTE, 0))} - {None}
        read = []
        for op in operations:
            lane = op.lane, op.device
            waits_for = {*hazards.dependencies(op), *before}
            if op.lane is not LaneName.OPTIMIZER and lane in newest_of_lane:
                waits_for.add(newest_of_lane[lane])
            newest_of_lane[lane] = Token(len(dependencies))
            if op.kind in (OperationKind.HEAD, OperationKind.NORM):
                read.append(newest_of_lane[lane])
            hazards.record(op, newest_of_lane[lane])
            dependencies.append({int(token) for token in waits_for})
    return dependencies


def legal_order(programs: list[tuple[Operation, ...]], choices: random.Random) -> list[int]:
    """Return a random order in which the lanes could finish the operations of these programs."""
    operations = [op for program in programs for op in program]
    dependencies = dependencies_of(programs)
    dependants = defaultdict(list)
    for n, waits_for in enumerate(dependencies):
        for earlier in waits_for:
            dependants[earlier].append(n)
    missing = [len(waits_for) for waits_for in dependencies]
    ready = [n for n, count in enumerate(missing) if not count]
    # One lane that is far ahead or far behind finds more errors than an even shuffle.
    special_lane, is_ahead = choices.choice(list(LaneName)), choices.random() < 0.5
    order = []
    while ready:
        preferred = [n for n in ready if (operations[n].lane is special_lane) == is_ahead]
        n = choices.choice(preferred if preferred and choices.random() < 0.9 else ready)
        ready.remove(n)
        order.append(n)
        for later in dependants[n]:
            missing[later] -= 1
            if not missing[later]:
                ready.append(later)
    assert len(order) == len(operations)
    return order


def check_final_state(plan: Plan, buffers: BufferModel) -> None:
    """Check that every tile has had each step's update once, and that its home has the newest."""
    for i in plan.local_fragments:
        tiles = plan.tile_count(i)
        assert [buffers.updated[i, tile] for tile in range(tiles)] == [STEPS] * tiles
        newest = (i, (STEPS,) * tiles)
        for tiers, contents in ((plan.weights, buffers.weights), (plan.moments, buffers.moments)):
            assert contents["record" if tiers[i] == "disk" else "home", i] == newest
    assert buffers.committed == (list(range(STEPS)) if plan.commits_steps else [])


@st.composite
def plans_of_muon(draw) -> Plan:
    """Draw any plan with which one GPU or several update their blocks themselves."""
    plans = arbitrary_plans().filter(lambda plan: plan.staged) | plans_of_several_devices()
    plan = draw(plans)
    devices = tuple(replace(share, name="cuda") for share in plan.devices)
    return replace(plan, device="cuda", devices=devices, optimizer=MUON)


@settings(max_examples=examples(50, 150), deadline=None)
@given(
    plan=arbitrary_plans() | plans_of_several_devices() | stage_plans() | plans_of_muon(),
    seed=st.integers(0, 2**32),
)
def test_program_executed_in_any_legal_order_of_lanes_is_correct(plan, seed):
    buffers, operations = BufferModel(plan), numbered_operations(plan)
    for n in legal_order([ops for _, ops in programs_of(plan)], random.Random(seed)):
        buffers.execute(operations[n])
    check_final_state(plan, buffers)


@settings(max_examples=examples(40, 100), deadline=None)
@given(plan=arbitrary_plans() | stage_plans())
def test_step_passes_each_block_once_forward_and_once_backward(plan):
    ends = bool(plan.ends)
    for name, ops in programs_of(plan):
        kinds = [op.kind for op in ops]
        computed = [op for op in ops if op.kind in COMPUTING]
        if name == "flush":
            assert not computed
        else:
            assert [(op.kind, op.blocks) for op in computed] == [
                *[(OperationKind.EMBED, (0,))] * ends,
                *((OperationKind.FORWARD, group) for group in plan.forward_groups),
                *[(OperationKind.HEAD, (plan.last_fragment,))] * ends,
                *((OperationKind.BACKWARD, group) for group in plan.backward_groups),
                *[(OperationKind.EMBED_BACKWARD, (0,))] * ends,
            ]
            norms = sorted(op.blocks[0] for op in ops if op.kind is OperationKind.NORM)
            assert norms == list(plan.local_fragments)
        assert all(op.lane is LaneName.COMPUTE for op in computed)
        assert kinds.count(OperationKind.COMMIT) <= 1


@settings(max_examples=examples(40, 100), deadline=None)
@given(plan=arbitrary_plans())
def test_exact_clipping_updates_after_the_last_gradient_then_commits(plan):
    for name, ops in programs_of(plan):
        order = [op.kind for op in ops]
        if name == "step" and plan.clipping == "exact":
            assert OperationKind.UPDATE not in order[order.index(OperationKind.HEAD) :]
        updates = [n for n, kind in enumerate(order) if kind is OperationKind.UPDATE]
        if plan.commits_steps and updates:
            (commit,) = [n for n, kind in enumerate(order) if kind is OperationKind.COMMIT]
            assert max(updates) < commit and ops[commit].lane is LaneName.WRITE
            changed = {OperationKind.STORE, OperationKind.WRITE}
            assert not [op for op in ops[commit:] if op.kind in changed], (
                "operations after the commit do not change the committed state"
            )
        else:
            assert OperationKind.COMMIT not in order


@settings(max_examples=60, deadline=None)
@given(plan=arbitrary_plans())
def test_operations_use_only_buffers_of_the_plan(plan):
    for _, ops in programs_of(plan):
        for op in ops:
            limit = plan.host_slots if op.kind is OperationKind.READ and plan.staged else plan.slots
            assert all(-1 <= slot < limit for slot in op.slots)
            assert all(-1 <= slot < plan.gradient_slots for slot in op.gradients)
            assert -1 <= op.ring_slot < plan.ring


def test_last_blocks_of_forward_are_still_in_slots_for_backward():
    plan = replace(from_disk(resident(ModelSpec(8, 16, 1, 8, 256))), slots=4)
    reads = Counter(
        op.blocks[0]
        for op in program_module.step_program(plan).operations
        if op.kind is OperationKind.READ
    )
    assert reads[8] == reads[7] == 1 and reads.total() < 2 * 8


def test_blocks_are_read_before_the_forward_that_needs_them():
    plan = replace(from_disk(resident(ModelSpec(8, 16, 1, 8, 256))), slots=3)
    ops = program_module.step_program(plan).operations
    first = next(n for n, op in enumerate(ops) if op.kind is OperationKind.FORWARD)
    assert {op.blocks[0] for op in ops[:first] if op.kind is OperationKind.READ} >= {1, 2}


def test_next_forward_is_loaded_as_soon_as_its_blocks_are_updated():
    model = ModelSpec(8, 16, 1, 8, 256)
    staged = replace(resident(model), staged=True, slots=3, host_gradient_slots=8)
    for clipping, loaded in (("layer", [1, 2, 3]), ("exact", [])):
        program = program_module.step_program(replace(staged, clipping=clipping))
        kinds = [op.kind for op in program.operations]
        end = len(kinds) - kinds[::-1].index(OperationKind.EMBED_BACKWARD)
        loads = [op for op in program.operations[end:] if op.kind is OperationKind.LOAD]
        assert [op.blocks[0] for op in loads if 0 < op.blocks[0] < 9] == loaded
        again = program_module.step_program(
            replace(staged, clipping=clipping), clipping == "exact", program.cached
        )
        before_forward = kinds_before(again.operations, OperationKind.FORWARD)
        assert (OperationKind.LOAD in before_forward) == (clipping == "exact")


def test_gpu_updates_with_muon_where_the_gradient_is():
    plan = replace(resident(ModelSpec(4, 16, 1, 8, 256)), staged=True, device="cuda", slots=2)
    for optimizer, clipping, moved in (
        ("adamw", "layer", [0, 1, 2, 3, 4, 5]),
        (MUON, "exact", [0, 1, 2, 3, 4, 5]),
        (MUON, "layer", [0, 5]),
    ):
        changes = {"clipping": clipping, "optimizer": optimizer, "host_gradient_slots": 4}
        operations = program_module.step_program(replace(plan, **changes)).operations
        offloads = [op.blocks[0] for op in operations if op.kind is OperationKind.OFFLOAD]
        assert sorted(offloads) == moved
        updates = {op.blocks[0]: n for n, op in enumerate(operations) if op.kind == "update"}
        if clipping == "layer":
            last_backward = max(n for n, op in enumerate(operations) if op.kind == "backward")
            assert updates[4] < last_backward < updates[1] < updates[0]


def kinds_before(operations: tuple[Operation, ...], kind: OperationKind) -> list[OperationKind]:
    kinds = [op.kind for op in operations if op.blocks and op.blocks[0] in (1, 2, 3)]
    return kinds[: kinds.index(kind)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"slots": 1}, "slots"),
        ({"gradient_slots": 1}, "gradient"),
        ({"staged": True, "host_gradient_slots": 1, "clipping": "layer"}, "gradient"),
        ({"staged": True, "host_gradient_slots": 3, "gradients": "host"}, "gradient"),
        ({"weights": ("disk",) * 6}, "ends"),
        ({"staged": True, "moments": ("host",) * 6}, "moments"),
    ],
)
def test_plan_that_cannot_be_executed_fails_with_the_reason(changes, reason):
    valid = replace(
        from_disk(resident(ModelSpec(4, 16, 1, 8, 256))),
        backward_groups=((3, 4), (1, 2)),
        slots=3,
        gradient_slots=3,
    )
    program_module.step_program(valid)
    with pytest.raises(AssertionError, match=reason):
        program_module.step_program(replace(valid, **changes))
