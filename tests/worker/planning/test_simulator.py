"""The simulator obeys the rules of the program and predicts steps of a steady state."""

from dataclasses import replace

import pytest
from example_hardware import cpu_machine
from helpers.worker.plans import arbitrary_plans, from_disk, resident, tiny_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.planning import cost_model, program, simulator
from barnraise.planning.plan import Plan
from barnraise.planning.program import Hazards, LaneName, Operation, OperationKind
from barnraise.planning.simulator import Price, Span, StepSimulation, Timeline
from barnraise.spec import OPTIMIZERS, ModelSpec

MACHINE = cpu_machine()
GPU = replace(MACHINE, device="cuda", elementwise=50 * MACHINE.stream)
DISK = (LaneName.READ, LaneName.WRITE)


def expected_begins(programs: list[tuple[Operation, ...]], spans: list[Span], eager: bool):
    """Return when each operation begins by the engine's own rule, by the operation's identity."""
    span_of = {id(span.op): span for span in spans}
    hazards: Hazards[Operation] = Hazards()
    begins, clock = {}, 0.0
    for op in (op for operations in programs for op in operations):
        ends = [span_of[id(each)].end for each in hazards.dependencies(op)]
        begins[id(op)] = max(0.0 if eager else clock, *ends, 0.0)
        hazards.record(op, op)
        clock = span_of[id(op)].end if op.lane is LaneName.COMPUTE else clock
    for lanes in (*((lane,) for lane in LaneName if lane not in DISK), DISK):
        free = 0.0
        for span in (span for span in spans if span.op.lane in lanes):
            begins[id(span.op)] = max(begins[id(span.op)], free)
            free = span.end
    return begins


def programs_of(plan: Plan) -> list[tuple[Operation, ...]]:
    first = program.step_program(plan)
    second = program.step_program(plan, plan.defers_updates, first.cached)
    return [first.operations, second.operations, program.flush_program(plan).operations]


@settings(max_examples=30, deadline=None)
@given(plan=arbitrary_plans(), eager=st.booleans(), seed=st.integers(1, 97))
def test_operations_run_when_the_hazards_allow_it(plan, eager, seed):
    programs = programs_of(plan)

    def price(op: Operation) -> Price:
        return Price(float(1 + (seed * (1 + sum(op.blocks) + 7 * op.tile + len(op.kind))) % 13))

    timeline = Timeline(price, eager, plan.last_fragment)
    spans = [span for operations in programs for span in timeline.append(operations)]
    spans += timeline.finish()
    begins = expected_begins(programs, spans, eager)
    assert len(spans) == len(begins) == sum(map(len, programs))
    for span in spans:
        assert (span.begin, span.end) == (begins[id(span.op)], span.begin + price(span.op).seconds)


def test_optimizer_takes_what_the_next_forward_needs_first():
    """Gradients come from the top: what is still to be done when backward ends is the top's."""
    updates = [Operation(OperationKind.UPDATE, LaneName.OPTIMIZER, (i,)) for i in (4, 5, 3, 2, 0)]
    timeline = Timeline(lambda op: Price(1.0), eager=True, last=5)
    assert timeline.append(updates) == []
    assert [span.op.blocks[0] for span in timeline.finish()] == [5, 0, 2, 3, 4]


def test_copies_make_an_update_longer_by_what_they_take_of_ram():
    update = Operation(OperationKind.UPDATE, LaneName.OPTIMIZER, (1,))
    load = Operation(OperationKind.LOAD, LaneName.IN, (2,))
    offload = Operation(OperationKind.OFFLOAD, LaneName.OUT, (3,))
    prices = {update: Price(10.0, ram=1.0), load: Price(2.0, ram=0.4), offload: Price(1.0, ram=0.8)}
    timeline = Timeline(prices.__getitem__, eager=True)
    loaded, offloaded = timeline.append([load, offload, update])
    (updated,) = timeline.finish()
    assert loaded.end == pytest.approx(2.0)
    assert offloaded.end == pytest.approx(1.2), "both directions ask for 1.2 of RAM's bandwidth"
    assert updated.end == pytest.approx(10.0 + 0.4 * 2.0 + 0.8 * 1.2)


def test_thread_that_launches_limits_a_step_of_small_kernels():
    kernels = [Operation(OperationKind.FORWARD, LaneName.COMPUTE, (i,)) for i in (1, 2, 3)]
    timeline = Timeline(lambda op: Price(1.0, launch=2.0), eager=True)
    assert [span.end for span in timeline.append(kernels)] == [2.0, 4.0, 6.0]


def test_launches_of_muon_are_those_of_its_matrices():
    plan = replace(tiny_plan("staged"), device="cuda", clipping="layer")
    update = Operation(OperationKind.UPDATE, LaneName.COMPUTE, (1,))
    adamw, muon = (
        StepSimulation(replace(plan, optimizer=optimizer), replace(GPU, launches=1.0)).price(update)
        for optimizer in OPTIMIZERS
    )
    assert muon.launch - adamw.launch == 6 * cost_model.MUON_KERNELS


@settings(max_examples=30, deadline=None)
@given(plan=arbitrary_plans(), kept_inputs=st.sampled_from(["block", "group"]))
def test_duration_of_an_operation_does_not_depend_on_earlier_ones(plan, kept_inputs):
    machine = replace(GPU, to_device=1e6, from_device=1e6)  # slower than everything else
    steps = StepSimulation(replace(plan, boundaries="host", kept_inputs=kept_inputs), machine)
    for op in (op for operations in programs_of(steps.plan) for op in operations):
        alone = StepSimulation(steps.plan, machine)
        assert steps.price(op) == alone.price(op)


def slow_disk_plan(**changes) -> Plan:
    """Return a plan that keeps its state in memory and commits each step to disk."""
    model = ModelSpec(layers=8, width=64, heads=2, context=64, vocabulary=512)
    on_disk = from_disk(resident(model))
    in_memory = ("host",) * 10
    return replace(
        on_disk, weights=in_memory, moments=in_memory, exchange="host", ring=0, **changes
    )


@pytest.mark.parametrize("clipping", ["exact", "layer"])
@pytest.mark.parametrize("slowness", [0.5, 1.1, 3.0, 10.0])
def test_step_lasts_as_long_as_its_writes_in_the_long_run(clipping, slowness):
    """The first steps write into buffers; the backlog is seen only when these are full."""
    plan = slow_disk_plan(clipping=clipping)
    fast = StepSimulation(plan, replace(MACHINE, disk_write=1e15, disk_read=1e15))
    written = sum(plan.total_bytes(kind, i) for kind in ("weights", "moments") for i in range(10))
    rate = written / (slowness * fast.step_seconds)
    machine = replace(MACHINE, disk_write=rate, disk_write_sustained=rate, disk_read=1e15)
    steps = StepSimulation(plan, machine)
    assert steps.step_seconds >= max(fast.step_seconds, slowness * fast.step_seconds) * 0.999
    assert steps.step_seconds <= (1.05 + slowness) * fast.step_seconds + simulator.COMMIT_SECONDS
    unmeasured = StepSimulation(plan, replace(machine, disk_write_sustained=0.0))
    assert unmeasured.step_seconds >= 3 * slowness * fast.step_seconds * 0.999


def test_simulated_steps_end_when_one_is_as_long_as_the_last(monkeypatch):
    appended = []
    append = Timeline.append

    def count(self, operations):
        appended.append(1)
        return append(self, operations)

    monkeypatch.setattr(Timeline, "append", count)
    assert StepSimulation(tiny_plan("resident"), MACHINE).spans
    assert len(appended) == 2
    appended.clear()
    slow = replace(MACHINE, disk_write=1e5)
    spans = StepSimulation(slow_disk_plan(), slow).spans
    assert 3 <= len(appended) <= simulator.MOST_STEPS + 1
    computed = [span for span in spans if span.op.lane is LaneName.COMPUTE]
    assert min(span.begin for span in computed) >= 0


def test_work_on_a_gpu_is_priced_at_its_memory_and_not_at_the_ram(monkeypatch):
    plan = replace(tiny_plan("staged"), device="cuda")
    norm = Operation(OperationKind.NORM, LaneName.COMPUTE, (1,), gradients=(0,))
    backward = Operation(OperationKind.BACKWARD, LaneName.COMPUTE, (1,))
    for op in (norm, backward):
        seconds = [
            StepSimulation(plan, replace(GPU, stream=stream)).price(op).seconds
            for stream in (1e9, 1e12)
        ]
        assert seconds[0] == seconds[1], "the speed of RAM does not matter to a GPU"
        on_cpu = [
            StepSimulation(tiny_plan(), replace(MACHINE, stream=stream)).price(op).seconds
            for stream in (1e9, 1e12)
        ]
        assert on_cpu[0] > on_cpu[1]


@pytest.mark.parametrize("kept_inputs", ["block", "group"])
def test_inputs_that_wait_in_ram_take_their_time_on_the_link(kept_inputs):
    model = ModelSpec(layers=8, width=64, heads=2, context=64, vocabulary=512)
    pairs = tuple((i, i + 1) for i in range(1, 9, 2))
    plan = replace(
        resident(model, 4, slots=3, gradient_slots=3, host_gradient_slots=8, staged=True),
        forward_groups=pairs,
        backward_groups=pairs[::-1],
        kept_inputs=kept_inputs,
        device="cuda",
    )
    waiting = replace(plan, boundaries="host")
    machine = replace(GPU, to_device=1e6, from_device=1e6)  # slower than everything else
    bare, copied = (StepSimulation(each, machine).busy_seconds for each in (plan, waiting))
    one = 4 * waiting.sequences * 64 * 64 / 1e6
    copies = len(waiting.stored_inputs) * waiting.micro_batches
    for lane in (LaneName.IN, LaneName.OUT):
        assert copied[lane] - bare[lane] == pytest.approx(copies * one)
    longer = StepSimulation(waiting, machine).step_seconds - max(bare.values())
    assert longer > 0
