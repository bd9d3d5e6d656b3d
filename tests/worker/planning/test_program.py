"""The schedule as data: plans of any shape, their programs run on buffers that only remember what is in them."""

import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from helpers.plans import arbitrary_plans, from_disk, resident
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.planning import program as program_module
from barnraise.planning.plan import Plan
from barnraise.planning.program import Hazards, LaneName, Operation, OperationKind
from barnraise.spec import ModelSpec

STEPS = 3


def programs(plan: Plan, steps: int = STEPS) -> list[tuple[str, tuple[Operation, ...]]]:
    """What the engine runs for so many steps and a flush."""
    found, cached, pending = [], {}, False
    for _ in range(steps):
        program = program_module.step_program(plan, pending=pending, cached=cached)
        found.append(("step", program.operations))
        cached, pending = program.cached, plan.clipping == "exact"
        if pending and not plan.defers_updates:
            program = program_module.flush_program(plan, cached=cached)
            found.append(("flush", program.operations))
            cached, pending = program.cached, False
    if pending:
        found.append(("flush", program_module.flush_program(plan, cached=cached).operations))
    return found


class MachineDescription:
    """Buffers whose contents are names: weights are the number of updates that each tile has had, a gradient is the
    step it is of. What each operation touches is what `buffers.py` gives it, and not what the operation says."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.weights: dict[tuple, tuple] = {}  # buffer → (fragment, version of each tile)
        self.moments: dict[tuple, tuple] = {}
        for i in range(plan.last_fragment + 1):
            fresh = (i, (0,) * plan.tile_count(i))
            for home in (("home", i), ("end", i), ("record", i)):
                self.weights[home] = fresh
            self.moments["home", i] = self.moments["record", i] = fresh
        self.gradients: dict[tuple, tuple] = {}  # buffer → (fragment, step)
        self.ring: dict[int, dict] = {}
        self.norms: dict[int, set[int]] = defaultdict(set)  # step → fragments
        self.updated: Counter = Counter()
        self.committed: list[int] = []

    def _at(self, i: int, slot: int) -> tuple:
        """Where fragment i's weights are computed with."""
        if slot >= 0:
            return "slot", slot
        return ("end", i) if i in (0, self.plan.last_fragment) and self._apart(i) else ("home", i)

    def _apart(self, i: int) -> bool:
        return self.plan.staged and self.plan.weights[i] != "device"

    def _computes_with(self, i: int, slot: int, updates: int) -> None:
        held = self.weights.get(self._at(i, slot))
        assert held == (i, (updates,) * self.plan.tile_count(i)), (
            f"{i} is computed with {held} after {updates} updates"
        )

    def _gradient(self, i: int, slot: int) -> tuple:
        return ("pool", slot) if slot >= 0 else ("own", i)

    def _host_gradient(self, i: int) -> tuple:
        return (
            ("end", i)
            if i in (0, self.plan.last_fragment)
            else ("host", self.plan.host_gradient_slot(i))
        )

    def do(self, op: Operation, step: int, updates: int, applies: int) -> None:
        """`step`: whose gradients are taken; `updates`: that computing must see; `applies`: whose updates are made."""
        plan, i = self.plan, op.blocks[0] if op.blocks else -1
        match op.kind:
            case OperationKind.READ:
                self.weights["stage" if plan.staged else "slot", op.slots[0]] = self.weights[
                    "record", i
                ]
            case OperationKind.LOAD:
                source = (
                    ("stage", i % plan.host_slots) if plan.weights[i] == "disk" else ("home", i)
                )
                self.weights[self._at(i, op.slots[0])] = self.weights[source]
            case OperationKind.EMBED:
                self._computes_with(0, -1, updates)
            case OperationKind.FORWARD:
                for block, slot in zip(op.blocks, op.slots, strict=True):
                    self._computes_with(block, slot, updates)
            case OperationKind.HEAD:
                self._computes_with(0, -1, updates)
                self._computes_with(plan.last_fragment, -1, updates)
                self.gradients["own", plan.last_fragment] = (plan.last_fragment, step)
            case OperationKind.BACKWARD:
                assert len({g for g in op.gradients if g >= 0}) == sum(g >= 0 for g in op.gradients)
                for block, slot, gradient in zip(op.blocks, op.slots, op.gradients, strict=True):
                    self._computes_with(block, slot, updates)
                    self.gradients[self._gradient(block, gradient)] = (block, step)
            case OperationKind.EMBED_BACKWARD:
                self.gradients["own", 0] = (0, step)
            case OperationKind.NORM:
                assert self.gradients[self._gradient(i, op.gradients[0])] == (i, step)
                self.norms[step].add(i)
            case OperationKind.OFFLOAD:
                self.gradients[self._host_gradient(i)] = self.gradients[
                    self._gradient(i, op.gradients[0])
                ]
            case OperationKind.SPILL:
                source = (
                    self._host_gradient(i) if plan.staged else self._gradient(i, op.gradients[0])
                )
                self.gradients["spilled", i] = self.gradients[source]
            case OperationKind.FETCH:
                self.ring[op.ring_slot] = {
                    "of": (i, op.tile),
                    "moments": self.moments["record", i][1][op.tile],
                    "weights": self.weights["record", i][1][op.tile],
                    "gradient": self.gradients.get(("spilled", i)),
                }
            case OperationKind.UPDATE:
                self._update(op, i, applies)
            case OperationKind.STORE:
                self._store(op, i)
            case OperationKind.WRITE:
                held = plan.weights[i] != "disk"
                self.weights["record", i] = self.weights[
                    ("home", i) if held else ("slot", op.slots[0])
                ]
            case OperationKind.COMMIT:
                self.committed.append(applies)
                for block in range(plan.last_fragment + 1):
                    whole = (block, (applies + 1,) * plan.tile_count(block))
                    assert self.weights["record", block] == self.moments["record", block] == whole
            case _:
                raise AssertionError(op)

    def _update(self, op: Operation, i: int, applies: int) -> None:
        plan, (slot,), (gradient_slot,) = self.plan, op.slots, op.gradients
        if plan.clipping == "exact":
            assert self.norms[applies] == set(range(plan.last_fragment + 1)), (
                "the clipped norm is of the whole gradient"
            )
        assert i in self.norms[applies]
        for t in [op.tile] if op.tile >= 0 else range(plan.tile_count(i)):
            ringed = self.ring[op.ring_slot] if op.ring_slot >= 0 else None
            assert ringed is None or ringed["of"] == (i, t)
            if ringed and plan.spills_gradient(i):
                gradient = ringed["gradient"]
            else:
                at = self._host_gradient(i) if self._apart(i) else self._gradient(i, gradient_slot)
                gradient = self.gradients[at]
            assert gradient == (i, applies), f"{op} of step {applies} takes the gradient {gradient}"
            if ringed:
                assert ringed["moments"] == applies
                ringed["moments"] += 1
            else:
                self.moments["home", i] = self._next(self.moments["home", i], i, t, applies)
            if ringed and plan.staged and plan.weights[i] == "disk":
                assert ringed["weights"] == applies
                ringed["weights"] += 1
            else:
                at = ("slot", slot) if slot >= 0 else ("home", i)
                self.weights[at] = self._next(self.weights[at], i, t, applies)
            self.updated[i, t] += 1

    @staticmethod
    def _next(held: tuple, i: int, t: int, version: int) -> tuple:
        assert held[0] == i and held[1][t] == version, (
            f"tile {t} of {i} is updated in {held} for step {version}"
        )
        return i, (*held[1][:t], version + 1, *held[1][t + 1 :])

    def _store(self, op: Operation, i: int) -> None:
        if op.ring_slot < 0:
            self.moments["record", i] = self.moments["home", i]
            return
        ringed, t = self.ring[op.ring_slot], op.tile
        assert ringed["of"] == (i, t)
        kinds = [(self.moments, "moments")]
        if self.plan.staged and self.plan.weights[i] == "disk":
            kinds.append((self.weights, "weights"))
        for records, kind in kinds:
            versions = records["record", i][1]
            records["record", i] = (i, (*versions[:t], ringed[kind], *versions[t + 1 :]))


def numbered(plan: Plan) -> list[tuple[Operation, int, int, int]]:
    """(operation, step, updates, applies) of all programs, as `Machine.do` takes them."""
    found, steps, updates = [], 0, 0
    for what, ops in programs(plan):
        immediate = what == "step" and plan.clipping != "exact"
        applying = any(op.kind is OperationKind.UPDATE for op in ops)
        before = updates + (1 if applying and not immediate else 0)
        found += [(op, steps, before, updates) for op in ops]
        updates += applying
        steps += what == "step"
    return found


def legal_order(ran: list[tuple[Operation, ...]], stir: random.Random) -> list[int]:
    """Some order in which lanes could finish these programs' operations: each lane in its own order, but for the
    optimizer's, which takes whatever can begin; and each program after what those before it computed, whose losses the
    engine looks at."""
    ops, begins = [op for program in ran for op in program], {0}
    for program in ran:
        begins.add(max(begins) + len(program))
    hazards, before, latest, computed = Hazards(), [], {}, set()
    for n, op in enumerate(ops):
        if n in begins:
            computed = {latest[LaneName.COMPUTE]} if LaneName.COMPUTE in latest else set()
        waits = set(hazards.dependencies(op)) | computed
        if op.lane is not LaneName.OPTIMIZER and op.lane in latest:
            waits.add(latest[op.lane])
        latest[op.lane] = Token(n)
        hazards.record(op, latest[op.lane])
        before.append({int(token) for token in waits})
    after, left = defaultdict(list), [len(waits) for waits in before]
    for n, waits in enumerate(before):
        for m in waits:
            after[m].append(n)
    ready, order = [n for n, count in enumerate(left) if not count], []
    favourite = stir.choice(
        list(LaneName)
    )  # one lane far ahead or far behind finds more than an even shuffle
    ahead = stir.random() < 0.5
    while ready:
        liked = [n for n in ready if (ops[n].lane is favourite) == ahead]
        n = stir.choice(liked if liked and stir.random() < 0.9 else ready)
        ready.remove(n)
        order.append(n)
        for m in after[n]:
            left[m] -= 1
            if not left[m]:
                ready.append(m)
    assert len(order) == len(ops)
    return order


class Token(int):
    """Hazards tells tokens apart by identity."""


@settings(max_examples=150, deadline=None)
@given(plan=arbitrary_plans())
def test_run_in_order_whatever_an_operation_needs_is_where_it_looks_for_it(plan):
    machine = MachineDescription(plan)
    for parts in numbered(plan):
        machine.do(*parts)
    finished(plan, machine)


@settings(max_examples=150, deadline=None)
@given(plan=arbitrary_plans(), seed=st.integers(0, 2**32))
def test_whatever_order_the_lanes_come_to_it_is_as_right_as_the_programs(plan, seed):
    machine, work = MachineDescription(plan), numbered(plan)
    for n in legal_order([ops for _, ops in programs(plan)], random.Random(seed)):
        machine.do(*work[n])
    finished(plan, machine)


def finished(plan: Plan, machine: MachineDescription) -> None:
    """Every tile had each step's update once, and the newest of everything is at its home."""
    for i in range(plan.last_fragment + 1):
        assert [machine.updated[i, t] for t in range(plan.tile_count(i))] == [
            STEPS
        ] * plan.tile_count(i)
        newest = (i, (STEPS,) * plan.tile_count(i))
        for tiers, homes in ((plan.weights, machine.weights), (plan.moments, machine.moments)):
            assert homes["record" if tiers[i] == "disk" else "home", i] == newest
    assert machine.committed == (list(range(STEPS)) if plan.commits_steps else [])


@settings(max_examples=100, deadline=None)
@given(plan=arbitrary_plans())
def test_a_step_passes_every_block_once_up_and_once_down(plan):
    for what, ops in programs(plan):
        kinds = [op.kind for op in ops]
        computed = [
            op
            for op in ops
            if op.kind
            in (
                OperationKind.EMBED,
                OperationKind.FORWARD,
                OperationKind.HEAD,
                OperationKind.BACKWARD,
                OperationKind.EMBED_BACKWARD,
            )
        ]
        if what == "flush":
            assert not computed
        else:
            assert [(op.kind, op.blocks) for op in computed] == [
                (OperationKind.EMBED, (0,)),
                *((OperationKind.FORWARD, group) for group in plan.forward_groups),
                (OperationKind.HEAD, (plan.last_fragment,)),
                *((OperationKind.BACKWARD, group) for group in plan.backward_groups),
                (OperationKind.EMBED_BACKWARD, (0,)),
            ]
            assert sorted(op.blocks[0] for op in ops if op.kind is OperationKind.NORM) == list(
                range(plan.last_fragment + 1)
            )
        assert all(op.lane is LaneName.COMPUTE for op in computed)
        assert kinds.count(OperationKind.COMMIT) <= 1


@settings(max_examples=100, deadline=None)
@given(plan=arbitrary_plans())
def test_each_disk_tile_is_fetched_updated_and_stored_in_order(plan):
    for _, ops in programs(plan):
        of: dict[tuple[int, int], list[OperationKind]] = defaultdict(list)
        for op in ops:
            if (
                op.kind in (OperationKind.FETCH, OperationKind.UPDATE, OperationKind.STORE)
                and op.ring_slot >= 0
            ):
                of[op.blocks[0], op.tile].append(op.kind)
        assert all(
            kinds == [OperationKind.FETCH, OperationKind.UPDATE, OperationKind.STORE]
            for kinds in of.values()
        )
        if any(op.kind is OperationKind.UPDATE for op in ops):
            through = [i for i in range(plan.last_fragment + 1) if plan.uses_ring(i)]
            assert set(of) == {(i, t) for i in through for t in range(plan.tile_count(i))}


@settings(max_examples=100, deadline=None)
@given(plan=arbitrary_plans())
def test_exact_clipping_updates_after_the_last_gradient_then_commits(plan):
    for what, ops in programs(plan):
        order = [op.kind for op in ops]
        if what == "step" and plan.clipping == "exact":
            assert OperationKind.UPDATE not in order[order.index(OperationKind.HEAD) :]
        updates = [n for n, kind in enumerate(order) if kind is OperationKind.UPDATE]
        if plan.commits_steps and updates:
            (commit,) = [n for n, kind in enumerate(order) if kind is OperationKind.COMMIT]
            assert max(updates) < commit and ops[commit].lane is LaneName.WRITE
            changed = {OperationKind.STORE, OperationKind.WRITE}
            assert not [op for op in ops[commit:] if op.kind in changed], (
                "what follows belongs to the next state"
            )
        else:
            assert OperationKind.COMMIT not in order


@settings(max_examples=60, deadline=None)
@given(plan=arbitrary_plans())
def test_no_buffer_is_named_that_the_plan_has_not(plan):
    for _, ops in programs(plan):
        for op in ops:
            limit = plan.host_slots if op.kind is OperationKind.READ and plan.staged else plan.slots
            assert all(-1 <= slot < limit for slot in op.slots)
            assert all(-1 <= slot < plan.gradient_slots for slot in op.gradients)
            assert -1 <= op.ring_slot < plan.ring


def test_blocks_that_forward_used_last_are_still_there_for_backward():
    plan = replace(from_disk(resident(ModelSpec(8, 16, 1, 8, 256))), slots=4)
    reads = Counter(
        op.blocks[0]
        for op in program_module.step_program(plan).operations
        if op.kind is OperationKind.READ
    )
    assert reads[8] == reads[7] == 1 and reads.total() < 2 * 8


def test_reading_ahead_begins_before_what_is_computed_needs_it():
    plan = replace(from_disk(resident(ModelSpec(8, 16, 1, 8, 256))), slots=3)
    ops = program_module.step_program(plan).operations
    first = next(n for n, op in enumerate(ops) if op.kind is OperationKind.FORWARD)
    assert {op.blocks[0] for op in ops[:first] if op.kind is OperationKind.READ} >= {1, 2}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (dict(slots=1), "slots"),
        (dict(gradient_slots=1), "gradient"),
        (dict(staged=True, host_gradient_slots=1, clipping="layer"), "gradient"),
        (dict(staged=True, host_gradient_slots=3, gradients="host"), "gradient"),
        (dict(weights=("disk",) * 6), "ends"),
        (dict(staged=True, moments=("host",) * 6), "moments"),
    ],
)
def test_a_plan_that_cannot_work_is_our_own_mistake_and_says_which(wrong, said):
    base = replace(
        from_disk(resident(ModelSpec(4, 16, 1, 8, 256))),
        backward_groups=((3, 4), (1, 2)),
        slots=3,
        gradient_slots=3,
    )
    program_module.step_program(base)
    with pytest.raises(AssertionError, match=said):
        program_module.step_program(replace(base, **wrong))
