"""The search finds plans within every budget, or refuses and lists changes that would fit."""

import re
from dataclasses import replace

import pytest
from example_hardware import cpu_machine
from helpers.effort import examples, one_in
from helpers.python_code import run_python
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from barnraise.errors import PlanError, StateError
from barnraise.formats import parse_bytes
from barnraise.planning import budgets, cost_model, memory_model, search, simulator
from barnraise.planning import program as program_module
from barnraise.planning.hardware import Hardware, UpdateRate
from barnraise.planning.limits import UNLIMITED, Limits
from barnraise.planning.plan import PipelineStage
from barnraise.planning.search import make_plan, make_stage_plan
from barnraise.planning.tile_layout import list_matrices
from barnraise.spec import OPTIMIZERS, ModelSpec, preset

GB = 10**9
PC = cpu_machine(
    name="a PC",
    cores=8,
    memory=32 * GB,
    disk=500 * GB,
    matmul=((256, 2e11), (1024, 4e11)),
    attention=1e11,
    elementwise=2e10,
    stream=3e10,
    adam=1e9,
    disk_read=2e9,
)
GPU = replace(
    PC,
    device="cuda",
    name="a GPU",
    device_memory=24 * GB,
    memory=64 * GB,
    dtype="bfloat16",
    matmul=((1024, 8e13),),
    attention=3e13,
    elementwise=8e11,
    to_device=2.4e10,
    from_device=2.4e10,
    disk=4000 * GB,
    updates=(
        UpdateRate("host", "bfloat16", 32, 4e8),
        UpdateRate("host", "bfloat16", 8, 1.5e8),
        UpdateRate("device", "bfloat16", 32, 1e10),
        UpdateRate("device", "bfloat16", 8, 6e9),
    ),
)
MODELS = ("gpt-nano", "gpt-mini", "gpt2-124m", "gpt2-1.5b", "gpt3-6.7b")


@st.composite
def planning_cases(draw) -> tuple[Hardware, ModelSpec, Limits, int]:
    """Draw a machine, a model, limits and the sequences of a step."""
    base, model = draw(st.sampled_from([PC, GPU])), preset(draw(st.sampled_from(MODELS)))

    def rate() -> float:
        return draw(st.floats(0.2, 5))

    machine = replace(
        base,
        adam=base.adam * rate(),
        disk_read=base.disk_read * rate(),
        disk_write=base.disk_write * rate(),
        to_device=base.to_device * rate(),
        elementwise=base.elementwise * rate(),
        updates=tuple(replace(update, rate=update.rate * rate()) for update in base.updates),
    )
    size = model.parameters
    device_memory = st.none() | st.floats(0.3, 40).map(
        lambda factor: int(size * factor) + 100_000_000
    )
    limits = Limits(
        memory=int(size * draw(st.floats(0.5, 60))) + 50_000_000,
        device_memory=draw(device_memory),
        disk=int(size * draw(st.floats(0, 120))),
        disk_writes_per_day=draw(st.sampled_from([None, 50 * GB, 2000 * GB, UNLIMITED])),
        clipping=draw(st.sampled_from(["auto", "none", "exact", "layer"])),
        crash_safety=draw(st.sampled_from(["auto", "exact", "restart"])),
        moments_bits=draw(st.sampled_from([8, 32])),
    )
    return machine, model, limits, draw(st.sampled_from([1, 2, 8, 12]))


@settings(max_examples=examples(20, 60), deadline=None)
@given(case=planning_cases())
def test_plan_obeys_every_budget_and_limit_and_can_be_executed(case):
    hardware, model, limits, sequences = case
    try:
        plan = make_plan(hardware, model, limits, sequences, advise=False)
    except PlanError as error:
        shortage = (
            r"it needs at least .* of (memory|disk|a GPU's memory|a PC's memory)"
            r"|one step would write .* to disk, and may write .* a day"
        )
        assert re.search(shortage, str(error)), error
        return
    assert memory_model.host_bytes(plan) == plan.host_bytes <= limits.memory
    assert plan.file_bytes() == plan.disk_bytes <= limits.disk
    assert memory_model.device_bytes(plan) == plan.device_bytes
    if limits.device_memory is not None:
        assert plan.staged and plan.device_bytes <= limits.device_memory
    if hardware.device == "cuda":
        usable = hardware.device_memory - budgets.CONTEXT_BYTES - budgets.WORKSPACE_BYTES
        assert plan.device_bytes < usable * 0.97
    assert plan.sequences * plan.micro_batches == sequences
    assert limits.clipping in ("auto", plan.clipping) and plan.moments_bits == limits.moments_bits
    if plan.on_disk:
        in_place = plan.crash_safety == "restart" and "disk" not in (*plan.weights, *plan.moments)
        assert limits.crash_safety in ("auto", plan.crash_safety)
        assert (plan.written_per_step > 0) != in_place
        if limits.disk_writes_per_day != UNLIMITED:
            daily = limits.disk_writes_per_day or 0.3 * hardware.disk
            assert plan.written_per_day <= daily * 1.001 and plan.written_per_step <= daily
    else:
        assert plan.disk_bytes == plan.written_per_step == plan.written_per_day == 0
    assert plan.step_seconds > 0 and plan.bottleneck in (
        "compute",
        "disk",
        "link",
        "optimizer",
        "disk writes a day",
    )
    first = program_module.step_program(plan)  # fails if the plan cannot be executed
    program_module.step_program(plan, pending=plan.defers_updates, cached=first.cached)


SLOW_UPDATES = replace(
    GPU,
    updates=(
        UpdateRate("host", "bfloat16", 32, 1.2e9),
        UpdateRate("device", "bfloat16", 32, 2.5e9),
    ),
)


@settings(max_examples=examples(15, 60), deadline=None)
@given(
    case=planning_cases(),
    factor=st.floats(1.0, 8.0),
    resource=st.sampled_from(["memory", "device_memory"]),
)
@example(
    (
        replace(SLOW_UPDATES, elementwise=1.6e12),
        preset("gpt2-124m"),
        Limits(memory=4_094_293_760, disk=0),
        1,
    ),
    2.0,
    "memory",
)
@example(
    (SLOW_UPDATES, preset("gpt2-124m"), Limits(memory=4_156_513_664, disk=0), 1), 2.0, "memory"
)
def test_more_memory_never_gives_a_slower_plan(case, factor, resource):
    """Within 0.5 %: the search does not simulate plans that can be faster by less than 0.4 %."""
    hardware, model, limits, sequences = case
    assume(getattr(limits, resource) is not None)
    try:
        less = make_plan(hardware, model, limits, sequences, advise=False)
    except PlanError:
        return
    roomier = replace(limits, **{resource: int(getattr(limits, resource) * factor)})
    plan = make_plan(hardware, model, roomier, sequences, advise=False)
    # The search prefers the recipe's own clipping even where it is a little slower, and so the
    # crash safety that costs least.
    allowed = less.step_seconds * 1.005
    allowed *= 1.0 if plan.clipping == less.clipping else search.EXACT_COSTS
    allowed *= 1.0 if plan.crash_safety == less.crash_safety else search.EXACT_COSTS
    assert plan.step_seconds <= allowed


@pytest.mark.parametrize(
    ("hardware", "model", "limits", "shortage"),
    [
        (PC, "gpt2-1.5b", Limits(memory=40_000_000), "of memory, and may use 40 MB"),
        (PC, "gpt2-1.5b", Limits(memory=4 * GB, disk=10 * GB), "of disk, and may use 10 GB"),
        (
            GPU,
            "gpt3-6.7b",
            Limits(device_memory=500_000_000),
            "of a GPU's memory, and may use 500 MB",
        ),
        (PC, "gpt3-175b", Limits(), "of disk, and may use"),
    ],
    ids=["memory", "disk", "GPU", "175B"],
)
def test_refusal_states_the_shortage_and_lists_changes_that_fit(hardware, model, limits, shortage):
    with pytest.raises(PlanError) as caught:
        make_plan(hardware, preset(model), limits, 8)
    reason, listed = str(caught.value).split(". What would fit: ")
    assert shortage in reason
    suggestions = listed.split("; ")
    assert 1 <= len(suggestions) <= 3
    for suggestion in suggestions:
        changed_model, sequences, changed_limits = preset(model), 8, limits
        if match := re.fullmatch(r"steps of (\d+) sequences instead of 8", suggestion):
            sequences = int(match[1])
        elif match := re.fullmatch(
            r"([\d.,]+ [TGM]B) of (memory|device memory|disk|disk writes per day)", suggestion
        ):
            size = parse_bytes(match[1].replace(",", "")) + 60_000_000  # it is printed rounded
            changed_limits = replace(limits, **{match[2].replace(" ", "_"): size})
        elif match := re.fullmatch(r"the preset (\S+)", suggestion):
            changed_model = preset(match[1])
        else:
            assert suggestion == "Adam's moments in 8 bits", suggestion
            changed_limits = replace(limits, moments_bits=8)
        make_plan(hardware, changed_model, changed_limits, sequences, advise=False)


def test_model_that_fits_in_memory_is_not_moved():
    plan = make_plan(PC, preset("gpt2-124m"), Limits())
    assert not plan.on_disk and plan.weights == ("host",) * 14 and plan.slots == 0
    kinds = {operation.kind for operation in program_module.step_program(plan).operations}
    computing = {"embed", "forward", "head", "backward", "embed backward", "norm", "update"}
    assert kinds <= computing


def test_model_larger_than_memory_fills_memory_and_uses_disk():
    plan = make_plan(PC, preset("gpt2-1.5b"), Limits(memory=12 * GB))
    assert plan.crash_safety == "restart" and plan.disk_bytes > 12 * 1.5 * GB
    assert plan.host_bytes > 0.7 * 12 * GB, "the plan uses the memory that it may use"
    safe = make_plan(PC, preset("gpt2-1.5b"), Limits(memory=12 * GB, crash_safety="exact"))
    assert safe.crash_safety == "exact" and safe.disk_bytes > plan.disk_bytes
    with pytest.raises(PlanError, match="of disk, and may use 50 GB"):
        limits = Limits(memory=12 * GB, disk=50 * GB, crash_safety="exact")
        make_plan(PC, preset("gpt2-1.5b"), limits)


def test_steps_are_committed_where_that_costs_little_time_and_writes():
    model, limits = preset("gpt2-124m"), Limits(memory=3 * GB, disk_writes_per_day=UNLIMITED)
    slow_pc = replace(PC, matmul=((1024, 2e10),))
    plan = make_plan(slow_pc, model, limits)
    assert plan.crash_safety == "exact" and 0 < plan.written_per_day < search.EXACT_WRITES
    restarting = make_plan(slow_pc, model, replace(limits, crash_safety="restart"))
    longest = search.EXACT_COSTS * restarting.step_seconds
    assert restarting.step_seconds <= plan.step_seconds < longest
    usual_pc = replace(PC, disk_write=1e12)  # commits cost it no time, but more than 1 TB a day
    assert make_plan(usual_pc, model, limits).crash_safety == "restart"
    slow_disk = replace(slow_pc, disk_write=3e6)
    assert make_plan(slow_disk, model, limits).crash_safety == "restart"


def test_writes_of_a_day_are_limited_by_the_size_of_the_drive():
    machine, model, limits = replace(PC, disk=20 * GB), preset("gpt2-124m"), Limits(memory=2 * GB)
    plan = make_plan(machine, model, limits)
    assert plan.written_per_step > 0 and plan.bottleneck == "disk writes a day"
    assert plan.daily_write_limit == 6 * GB and plan.written_per_day == pytest.approx(6 * GB)
    freer = make_plan(machine, model, replace(limits, disk_writes_per_day=UNLIMITED))
    assert freer.daily_write_limit is None and freer.step_seconds < plan.step_seconds / 5
    with pytest.raises(PlanError, match=r"one step would write .* may write 100 MB a day\. What"):
        make_plan(machine, model, replace(limits, disk_writes_per_day=GB // 10))


def test_plan_of_the_second_gpu_names_it():
    assert make_plan(replace(GPU, device_index=1), preset("gpt2-124m")).device == "cuda:1"
    assert make_plan(GPU, preset("gpt2-124m")).device == "cuda"


@pytest.mark.parametrize("memory", [2000 * GB, 512 * GB], ids=["memory", "disk"])
def test_search_for_175_billion_parameters_takes_few_simulations(monkeypatch, memory):
    """Simulations are counted, not timed: they are what a search costs."""
    program_lengths = []
    step_program = program_module.step_program

    def record_program(*args, **kwargs):
        program = step_program(*args, **kwargs)
        program_lengths.append(len(program.operations))
        return program

    monkeypatch.setattr(program_module, "step_program", record_program)
    big = replace(GPU, memory=memory, disk=20_000 * GB, device_memory=80 * GB)
    plan = make_plan(big, preset("gpt3-175b"), Limits(), 8)
    assert plan.model.layers == 96 and len(program_lengths) <= 42
    assert max(program_lengths) <= 96 * (3 * simulator.TILES + 16), (
        "no tile is smaller than an eighth of a block"
    )
    program_lengths.clear()
    with pytest.raises(PlanError, match="does not fit"):
        make_plan(PC, preset("gpt3-175b"), Limits())
    assert not program_lengths, "a refusal simulates nothing"


@pytest.mark.parametrize("clipping", ["exact", "layer"])
@pytest.mark.parametrize("merged", [2, 5])
def test_simulation_with_merged_tiles_predicts_the_same_seconds(monkeypatch, clipping, merged):
    """Within 3 %, so the simulation need not contain every tile."""
    limits = Limits(memory=30 * GB, clipping=clipping)
    plan = make_plan(replace(GPU, device_memory=8 * GB), preset("gpt3-6.7b"), limits, 8)
    assert plan.on_disk and plan.tile_count(1) == simulator.TILES * 2 - 3
    monkeypatch.setattr(simulator, "TILES", plan.tile_count(1))
    unmerged = simulator.StepSimulation(plan, GPU).step_seconds
    monkeypatch.setattr(simulator, "TILES", -(-plan.tile_count(1) // merged))
    assert simulator.StepSimulation(plan, GPU).step_seconds == pytest.approx(unmerged, rel=0.03)


def test_fast_device_updates_move_more_weights_to_the_device():
    """A GPU with free memory updates weights itself instead of waiting for the host."""
    model = preset("gpt2-1.5b")
    fast_gpu = replace(GPU, device_memory=40 * GB)
    slow_gpu = replace(
        fast_gpu,
        updates=tuple(
            replace(update, rate=update.rate / 50) if update.where == "device" else update
            for update in fast_gpu.updates
        ),
    )
    fast, slow = (
        make_plan(hardware, model, Limits(clipping="exact"), 8) for hardware in (fast_gpu, slow_gpu)
    )
    assert fast.weights.count("device") > slow.weights.count("device")
    assert fast.step_seconds < slow.step_seconds


def test_fragments_of_a_model_on_disk_stay_on_the_device():
    """A GPU of 24 GB is not left empty because the RAM does not hold the state."""
    plan = make_plan(GPU, preset("gpt3-6.7b"), Limits(memory=32 * GB))
    assert plan.on_disk and plan.weights[0] == plan.moments[0] == "device"
    assert memory_model.device_bytes(plan) <= budgets.compute_budgets(GPU, Limits()).device_memory


def test_deterministic_plan_of_a_gpu_is_priced():
    model, limits = preset("gpt2-355m"), Limits(deterministic=True)
    fast, deterministic = make_plan(GPU, model), make_plan(GPU, model, limits)
    assert deterministic.deterministic and not fast.deterministic
    assert deterministic.step_seconds > fast.step_seconds
    same = replace(fast, deterministic=True)
    assert memory_model.activations(same) >= memory_model.activations(fast)
    assert not make_plan(PC, model, limits).deterministic, "a CPU is"


def test_host_that_launches_slowly_gets_larger_micro_batches():
    slow = replace(GPU, launches=20_000.0)
    fast, limited = (
        make_plan(machine, preset("gpt2-124m"), Limits(device_memory=2_500_000_000), 8)
        for machine in (GPU, slow)
    )
    assert limited.step_seconds > fast.step_seconds
    kernels = limited.micro_batches * limited.model.layers * 70
    assert limited.step_seconds >= 0.99 * kernels / slow.launches
    assert limited.sequences >= fast.sequences


def test_planning_needs_no_torch():
    program = (
        "import sys\n"
        "from barnraise.planning import budgets, cost_model, hardware, limits\n"
        "from barnraise.planning import memory_model, plan, program, search, simulator\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'numpy'}))"
    )
    assert run_python(program, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    "invalid",
    [
        {"memory": -1},
        {"clipping": "some"},
        {"crash_safety": "no"},
        {"moments_bits": 4},
        {"precision": "x"},
    ],
)
def test_invalid_limits_are_refused_with_a_sentence(invalid):
    with pytest.raises(StateError, match=r"cannot be negative|must be|not 4"):
        Limits(**invalid)


@settings(max_examples=100, deadline=None)
@given(size=st.integers(0, 10**15))
def test_parse_bytes_reads_sizes_as_people_write_them(size):
    assert parse_bytes(str(size)) == parse_bytes(f" {size} b") == size
    assert parse_bytes(f"{size % 1000}GB") == size % 1000 * GB
    assert parse_bytes(f"{size % 1000} gib") == (size % 1000) << 30
    assert parse_bytes("1.5T") == 1_500_000_000_000


@pytest.mark.parametrize("text", ["", "GB", "much", "-1GB", "1e30", "nan", "inf", "4XB"])
def test_parse_bytes_refuses_what_is_not_a_size(text):
    with pytest.raises(StateError, match="size"):
        parse_bytes(text)


MUON_LIMITS = [
    Limits(),
    Limits(memory=8 * GB),
    Limits(memory=8 * GB, crash_safety="exact"),
    Limits(clipping="layer", precision="float32"),
]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("machine", "limits"),
    [(PC, limits) for limits in MUON_LIMITS] + one_in(2, [(GPU, limits) for limits in MUON_LIMITS]),
    ids=lambda value: getattr(value, "name", ""),
)
def test_plan_with_muon_fits_and_prices_its_products(machine, limits):
    model = preset("gpt2-774m")
    adamw, muon = (make_plan(machine, model, limits, advise=False, optimizer=o) for o in OPTIMIZERS)
    muon.validate()
    assert muon.optimizer == "muon" and memory_model.host_bytes(muon) <= machine.memory
    assert limits.memory is None or muon.host_bytes <= limits.memory
    assert muon.device_bytes <= machine.device_memory
    assert muon.disk_bytes <= machine.disk
    matrices = [(m.rows, m.columns) for m in list_matrices(model.fragments()[1])]
    products = model.layers * cost_model.muon_seconds(machine, matrices)
    assert muon.step_seconds >= 0.99 * products
    if not adamw.on_disk and adamw.bottleneck == "compute":  # the host's AdamW limits no step
        assert muon.step_seconds >= adamw.step_seconds + 0.5 * products
    if muon.on_disk and adamw.on_disk:
        assert muon.disk_bytes < adamw.disk_bytes
    assert not any(map(muon.spills_gradient, muon.blocks))
    if muon.clipping == "layer":  # exact only where that is as fast
        waiting = (muon.moves_gradient, muon.has_gradient_buffer)
        assert not any(waits(i) for waits in waiting for i in muon.blocks)


def test_plan_of_less_state_fits_with_muon_where_adamw_does_not():
    sizes = []
    for optimizer in OPTIMIZERS:
        plan = make_plan(PC, preset("gpt2-774m"), Limits(), advise=False, optimizer=optimizer)
        assert not plan.on_disk
        sizes.append(plan.host_bytes)
    limits = Limits(memory=sum(sizes) // 2, disk=0)
    plan = make_plan(PC, preset("gpt2-774m"), limits, advise=False, optimizer="muon")
    assert plan.host_bytes <= limits.memory


# ---- stages of a crew ----------------------------------------------------------------------------


def stage(model, first, last, *, leads=False, sequences=1):
    """Return the stage of blocks `first` to `last`, with the ends if it leads."""
    blocks = tuple(range(first, last + 1))
    ends = (0, model.layers + 1) if leads else ()
    return PipelineStage(tuple(sorted((*ends, *blocks))), sequences)


def test_stages_of_a_crew_fit_machines_that_no_whole_model_fits():
    model, limits = preset("gpt2-1.5b"), Limits(memory=16 * GB, disk=0)
    with pytest.raises(PlanError, match="does not fit"):
        make_plan(PC, model, limits, 16, advise=False)
    cuts = [(1, 12), (13, 24), (25, 36), (37, 48)]
    plans = [
        make_stage_plan(PC, model, stage(model, *cut, leads=cut[0] == 1), limits, 16)
        for cut in cuts
    ]
    assert sorted(i for plan in plans for i in plan.local_fragments) == list(range(50))
    for plan in plans:
        assert plan.host_bytes <= 16 * GB and plan.micro_batches == 16 and not plan.on_disk
        assert len(plan.forward_groups) == 1, "each micro-batch goes on at once"
        assert plan.clipping == "exact"
    lead, *members = plans
    assert lead.step_seconds > members[0].step_seconds > 0, "the lead has the head as well"


def test_stage_that_does_not_fit_is_refused():
    model = preset("gpt2-1.5b")
    with pytest.raises(PlanError, match="of memory"):
        make_stage_plan(PC, model, stage(model, 1, 40), Limits(memory=4 * GB, disk=0), 8)


@pytest.mark.parametrize("machine", [PC, GPU], ids=["cpu", "gpu"])
def test_stage_of_the_whole_model_fits_where_the_model_does(machine):
    model = preset("gpt2-774m")
    whole = make_stage_plan(machine, model, stage(model, 1, 36, leads=True), Limits(), 8)
    assert not whole.is_stage and whole.local_fragments == tuple(range(38))
    assert memory_model.host_bytes(whole) == whole.host_bytes


def test_member_on_a_card_or_with_state_on_disk_has_a_plan():
    model = preset("gpt3-6.7b")
    member = stage(model, 9, 20)
    card = make_stage_plan(replace(GPU, device_memory=12 * GB), model, member, Limits(), 8)
    disk = make_stage_plan(GPU, model, member, Limits(memory=12 * GB), 8)
    assert card.staged and card.device_bytes <= 12 * GB and not card.ends
    assert disk.on_disk and disk.written_per_step > 0
