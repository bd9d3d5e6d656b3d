"""Plans: found within every budget, never worse with more, refused with what would do."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import barnraise
from barnraise.errors import PlanError, StateError
from barnraise.formats import parse_bytes
from barnraise.planning import memory_model, search, simulator
from barnraise.planning import program as program_module
from barnraise.planning.hardware import Hardware, UpdateRate
from barnraise.planning.limits import Limits
from barnraise.planning.search import make_plan
from barnraise.spec import ModelSpec, preset

GB = 10**9
PC = Hardware(
    device="cpu", name="a PC", cores=8, memory=32 * GB, device_memory=0, disk=500 * GB, dtype="float32",
    matmul=((256, 2e11), (1024, 4e11)), attention=1e11, elementwise=2e10, to_device=1e10, from_device=1e10, stream=3e10,
    adam=1e9, disk_read=2e9, disk_write=1e9,
)  # fmt: skip
CARD = replace(
    PC, device="cuda", name="a GPU", device_memory=24 * GB, memory=64 * GB, dtype="bfloat16", matmul=((1024, 8e13),),
    attention=3e13, elementwise=8e11, to_device=2.4e10, from_device=2.4e10, disk=4000 * GB,
    updates=(
        UpdateRate("host", "bfloat16", 32, 4e8), UpdateRate("host", "bfloat16", 8, 1.5e8),
        UpdateRate("device", "bfloat16", 32, 1e10), UpdateRate("device", "bfloat16", 8, 6e9),
    ),
)  # fmt: skip
MODELS = ("gpt-nano", "gpt-mini", "gpt2-124m", "gpt2-1.5b", "gpt3-6.7b")


@st.composite
def machines(draw) -> tuple[Hardware, ModelSpec, Limits, int]:
    base, model = draw(st.sampled_from([PC, CARD])), preset(draw(st.sampled_from(MODELS)))

    def rate() -> float:
        return draw(st.floats(0.2, 5))

    machine = replace(
        base, adam=base.adam * rate(), disk_read=base.disk_read * rate(), disk_write=base.disk_write * rate(),
        to_device=base.to_device * rate(), elementwise=base.elementwise * rate(),
        updates=tuple(replace(each, rate=each.rate * rate()) for each in base.updates),
    )  # fmt: skip
    size = model.parameters
    limits = Limits(
        memory=int(size * draw(st.floats(0.5, 60))) + 50_000_000,
        device_memory=int(size * draw(st.floats(0.3, 40))) + 100_000_000
        if draw(st.booleans())
        else None,
        disk=int(size * draw(st.floats(0, 120))),
        disk_writes_per_day=draw(st.sampled_from([None, 50 * GB, 2000 * GB])),
        clipping=draw(st.sampled_from(["auto", "none", "exact", "layer"])),
        crash_safety=draw(st.sampled_from(["auto", "exact", "restart"])),
        moments_bits=draw(st.sampled_from([8, 32])),
    )
    return machine, model, limits, draw(st.sampled_from([1, 2, 8, 12]))


@settings(max_examples=60, deadline=None)
@given(asked=machines())
def test_plan_keeps_every_budget_and_limit_and_can_be_executed(asked):
    hardware, model, limits, sequences = asked
    try:
        plan = make_plan(hardware, model, limits, sequences, advise=False)
    except PlanError as error:
        assert re.search(
            r"at the least it needs .* of (memory|disk|a GPU's memory|a PC's memory)", str(error)
        ), error
        return
    assert memory_model.host_bytes(plan) == plan.host_bytes <= limits.memory
    assert plan.file_bytes() == plan.disk_bytes <= limits.disk
    assert memory_model.device_bytes(plan) == plan.device_bytes
    if limits.device_memory is not None:
        assert plan.staged and plan.device_bytes <= limits.device_memory
    elif hardware.device == "cuda":
        assert plan.device_bytes < hardware.device_memory
    assert plan.sequences * plan.micro_batches == sequences
    assert limits.clipping in ("auto", plan.clipping) and plan.moments_bits == limits.moments_bits
    if plan.on_disk:
        in_place = plan.crash_safety == "restart" and "disk" not in (*plan.weights, *plan.moments)
        assert (
            limits.crash_safety in ("auto", plan.crash_safety)
            and (plan.written_per_step > 0) != in_place
        )
        if limits.disk_writes_per_day:
            assert plan.written_per_day <= limits.disk_writes_per_day * 1.001
    else:
        assert plan.disk_bytes == plan.written_per_step == plan.written_per_day == 0
    assert plan.step_seconds > 0 and plan.bottleneck in (
        "compute",
        "disk",
        "link",
        "optimizer",
        "disk writes a day",
    )
    first = program_module.step_program(plan)  # asserts what it takes for granted
    program_module.step_program(plan, pending=plan.defers_updates, cached=first.cached)


SLOW = replace(
    CARD,
    updates=(
        UpdateRate("host", "bfloat16", 32, 1.2e9),
        UpdateRate("device", "bfloat16", 32, 2.5e9),
    ),
)


@settings(max_examples=25, deadline=None)
@given(
    asked=machines(), more=st.floats(1.0, 8.0), which=st.sampled_from(["memory", "device_memory"])
)
@example(
    (
        replace(SLOW, elementwise=1.6e12),
        preset("gpt2-124m"),
        Limits(memory=4_094_293_760, disk=0),
        1,
    ),
    2.0,
    "memory",
)
@example((SLOW, preset("gpt2-124m"), Limits(memory=4_156_513_664, disk=0), 1), 2.0, "memory")
def test_more_memory_never_makes_a_slower_plan(asked, more, which):
    """Within 2 %: of the candidates a few are looked at closely."""
    hardware, model, limits, sequences = asked
    assume(getattr(limits, which) is not None)
    try:
        less = make_plan(hardware, model, limits, sequences, advise=False)
    except PlanError:
        return
    roomier = replace(limits, **{which: int(getattr(limits, which) * more)})
    plan = make_plan(hardware, model, roomier, sequences, advise=False)
    if limits.clipping != "auto" or plan.clipping == less.clipping:
        assert plan.step_seconds <= less.step_seconds * 1.02
    else:  # the recipe's own clipping is worth a little
        assert plan.step_seconds <= less.step_seconds * search.EXACT_COSTS * 1.02


@pytest.mark.parametrize(
    ("hardware", "model", "limits", "short"),
    [
        (PC, "gpt2-1.5b", Limits(memory=40_000_000), "of memory, and may use 40 MB"),
        (PC, "gpt2-1.5b", Limits(memory=4 * GB, disk=10 * GB), "of disk, and may use 10 GB"),
        (
            CARD,
            "gpt3-6.7b",
            Limits(device_memory=500_000_000),
            "of a GPU's memory, and may use 500 MB",
        ),
        (PC, "gpt3-175b", Limits(), "of disk, and may use"),
    ],
    ids=["memory", "disk", "GPU", "175B"],
)
def test_a_refusal_names_what_is_short_and_each_thing_it_lists_really_fits(
    hardware, model, limits, short
):
    with pytest.raises(PlanError) as caught:
        make_plan(hardware, preset(model), limits, 8)
    said, listed = str(caught.value).split(". What would fit: ")
    assert short in said
    advised = listed.split("; ")
    assert 1 <= len(advised) <= 3
    for each in advised:
        asked, sequences, wanted = preset(model), 8, limits
        if found := re.fullmatch(r"steps of (\d+) sequences instead of 8", each):
            sequences = int(found[1])
        elif found := re.fullmatch(r"([\d.,]+ [GM]B) of (memory|device memory|disk)", each):
            enough = parse_bytes(found[1].replace(",", "")) + 60_000_000  # it is printed rounded
            wanted = replace(limits, **{found[2].replace(" ", "_"): enough})
        elif found := re.fullmatch(r"the preset (\S+)", each):
            asked = preset(found[1])
        else:
            assert each == "Adam's moments in 8 bits", each
            wanted = replace(limits, moments_bits=8)
        make_plan(hardware, asked, wanted, sequences, advise=False)


def test_what_fits_in_memory_is_not_put_on_disk_and_nothing_moves():
    plan = make_plan(PC, preset("gpt2-124m"), Limits())
    assert not plan.on_disk and plan.weights == ("host",) * 14 and plan.slots == 0
    assert {op.kind for op in program_module.step_program(plan).operations} <= {
        "embed", "forward", "head", "backward", "embed backward", "norm", "update",
    }  # fmt: skip


def test_model_larger_than_memory_keeps_the_most_useful_part_in_memory():
    plan = make_plan(PC, preset("gpt2-1.5b"), Limits(memory=12 * GB))
    assert plan.crash_safety == "exact" and plan.disk_bytes > 12 * 1.5 * GB
    assert plan.host_bytes > 0.7 * 12 * GB, "memory that may be used is used"
    tight = make_plan(PC, preset("gpt2-1.5b"), Limits(memory=12 * GB, disk=50 * GB))
    assert tight.crash_safety == "restart" and tight.disk_bytes < plan.disk_bytes


@pytest.mark.parametrize("memory", [2000 * GB, 512 * GB], ids=["memory", "disk"])
def test_search_for_175_billion_parameters_takes_few_simulations(monkeypatch, memory):
    """Counted and not timed: what it costs is schedules written and run."""
    programs = []
    whole = program_module.step_program

    def written(*args, **kwargs):
        programs.append(len((program := whole(*args, **kwargs)).operations))
        return program

    monkeypatch.setattr(program_module, "step_program", written)
    big = replace(CARD, memory=memory, disk=20_000 * GB, device_memory=80 * GB)
    plan = make_plan(big, preset("gpt3-175b"), Limits(), 8)
    assert plan.model.layers == 96 and len(programs) <= 36
    assert max(programs) <= 96 * (3 * simulator.TILES + 16), (
        "tiles are told apart no finer than an eighth of a block"
    )
    programs.clear()
    with pytest.raises(PlanError, match="does not fit"):
        make_plan(PC, preset("gpt3-175b"), Limits())
    assert len(programs) == 0, "a refusal simulates nothing"


@pytest.mark.parametrize("clipping", ["exact", "layer"])
@pytest.mark.parametrize("merged", [2, 5])
def test_a_step_takes_as_long_with_tiles_merged_to_predict_it(monkeypatch, clipping, merged):
    """Within 3 %: prediction need not tell every tile apart."""
    limits = Limits(memory=30 * GB, clipping=clipping)
    plan = make_plan(replace(CARD, device_memory=8 * GB), preset("gpt3-6.7b"), limits, 8)
    assert plan.on_disk and plan.tile_count(1) == simulator.TILES * 2 - 3
    monkeypatch.setattr(simulator, "TILES", plan.tile_count(1))
    whole = simulator.StepSimulation(plan, CARD).step_seconds
    monkeypatch.setattr(simulator, "TILES", -(-plan.tile_count(1) // merged))
    assert simulator.StepSimulation(plan, CARD).step_seconds == pytest.approx(whole, rel=0.03)


def test_what_updates_cost_in_their_form_and_place_counts():
    """A card with room to spare keeps the state of what it would else wait for the host to update."""
    card, asked = replace(CARD, device_memory=40 * GB), preset("gpt2-1.5b")
    plan = make_plan(card, asked, Limits(clipping="exact"), 8)
    slow = replace(
        card,
        updates=tuple(
            replace(u, rate=u.rate / (50 if u.where == "device" else 1)) for u in card.updates
        ),
    )
    other = make_plan(slow, asked, Limits(clipping="exact"), 8)
    assert plan.weights.count("device") > other.weights.count("device")
    assert plan.step_seconds < other.step_seconds


def test_planning_needs_no_torch():
    root = str(Path(barnraise.__file__).parents[1])
    program = (
        f"import sys; sys.path.insert(0, {json.dumps(root)})\n"
        "from barnraise.planning import cost_model, hardware, limits\n"
        "from barnraise.planning import memory_model, plan, program, search, simulator\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'numpy'}))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "wrong",
    [
        dict(memory=-1),
        dict(clipping="some"),
        dict(crash_safety="no"),
        dict(moments_bits=4),
        dict(precision="x"),
    ],
)
def test_limits_that_make_no_sense_are_refused_with_a_sentence(wrong):
    with pytest.raises(StateError, match=r"cannot be negative|must be|not 4"):
        Limits(**wrong)


@settings(max_examples=100, deadline=None)
@given(size=st.integers(0, 10**15))
def test_sizes_are_read_as_people_write_them(size):
    assert parse_bytes(str(size)) == parse_bytes(f" {size} b") == size
    assert parse_bytes(f"{size % 1000}GB") == size % 1000 * GB
    assert parse_bytes(f"{size % 1000} gib") == (size % 1000) << 30
    assert parse_bytes("1.5T") == 1_500_000_000_000


@pytest.mark.parametrize("text", ["", "GB", "much", "-1GB", "1e30", "nan", "inf", "4XB"])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(StateError, match="size"):
        parse_bytes(text)
