"""The engine's CUDA path on a fake card: devices, bytes, launches, and waits of the host."""

from dataclasses import replace

import pytest
from helpers.cuda.card_plans import (
    card_plan,
    launches_per_block,
    live_through,
    on_disk,
    plain_launches,
)
from helpers.cuda.card_probe import probe_products

from barnraise.planning import memory_model
from barnraise.spec import preset
from barnraise.spec.architectures import architecture_of

pytestmark = pytest.mark.xdist_group("fake card")

SMALL = replace(preset("gpt-mini", 50_257), layers=2)
WIDE = replace(preset("gpt3-1.3b"), layers=3, context=1024)
# Both forms of weights and moments, kinds of residence and places of boundaries occur.
PLANS = {
    "layer, some resident, boundaries in RAM": card_plan(
        resident=3, clipping="layer", boundaries="host", near_inputs=1, micro_batches=4
    ),
    "8-bit moments, fp32, all resident, retained": card_plan(
        resident=4, moments_bits=8, dtype="float32", retained_blocks=2
    ),
}
# Other combinations of the same kinds, and models of other sizes.
MORE_PLANS = {
    "disk, none": on_disk(card_plan(clipping="none")),
    "Muon, layer, some resident": card_plan(SMALL, 3, clipping="layer", optimizer="muon"),
    "layer, some resident": card_plan(resident=3, clipping="layer"),
    "boundaries in RAM": card_plan(boundaries="host", micro_batches=4),
    "disk": on_disk(card_plan()),
    "8-bit moments, retained": card_plan(resident=4, moments_bits=8, retained_blocks=2),
    "none, fp32, all resident": card_plan(resident=4, clipping="none", dtype="float32"),
    "fp32": card_plan(dtype="float32"),
    "8-bit moments, all resident": card_plan(resident=4, moments_bits=8),
    "retained": card_plan(resident=4, retained_blocks=2),
    "disk, layer, weights in RAM": on_disk(
        card_plan(clipping="layer", dtype="float32"), "host", "restart"
    ),
    "some resident": card_plan(resident=3, micro_batches=3),
    "wide": card_plan(WIDE),
    "wide, fp32": card_plan(WIDE, dtype="float32", sequences=2),
    "wide, boundaries in RAM": card_plan(WIDE, boundaries="host", micro_batches=4),
    "wide, groups, boundaries in RAM": card_plan(WIDE, boundaries="host", group=2),
    "8-bit moments in RAM": card_plan(moments_bits=8, clipping="layer"),
    "8-bit moments, fp32": card_plan(moments_bits=8, dtype="float32", resident=4),
    "retained, boundaries in RAM": card_plan(resident=4, retained_blocks=1, boundaries="host"),
    "none, group": card_plan(WIDE, clipping="none", group=3),
    "disk, some resident": on_disk(card_plan(resident=3), crash_safety="restart"),
    "disk, exact, some resident": on_disk(card_plan(resident=3)),
    "Muon, disk": on_disk(card_plan(SMALL, optimizer="muon")),
    "Muon, fp32, all resident": card_plan(
        SMALL, 4, clipping="none", dtype="float32", optimizer="muon"
    ),
    "disk, boundaries in RAM": on_disk(card_plan(boundaries="host", clipping="none")),
}
SLOW = [pytest.param(plan, marks=pytest.mark.slow, id=name) for name, plan in MORE_PLANS.items()]


@pytest.mark.parametrize("plan", [*(pytest.param(p, id=n) for n, p in PLANS.items()), *SLOW])
def test_life_on_a_card_keeps_the_rules(plan, card, tmp_path):
    """Step, exchange, evaluate, save, load and resync.

    Nothing mixes devices, the card holds what the plan predicts, a step waits for it once, and all
    memory is free after the end.
    """
    life = card(live_through, plan, tmp_path)
    assert not life.mixes
    predicted = memory_model.device_bytes(plan)
    assert 0.95 * predicted <= life.peak <= predicted, f"{predicted} bytes: {life.highest}"
    assert life.left <= memory_model.scratch_bytes(plan, "cuda")  # the thread's own, for the next
    step = life.phases["step"]
    assert not step.unaligned
    if not plan.on_disk:
        assert len(step.waits) == 1, step.waits
        uploads = [copy for copy in step.copies if copy.blocking]
        assert len(uploads) == plan.micro_batches, uploads  # the tokens


def test_only_what_crosses_the_link_is_pinned(card):
    plan = MORE_PLANS["layer, some resident"]
    life = card(live_through, plan)
    paged = [i for i in plan.blocks if plan.weights[i] == "host"]
    crosses = sum(plan.total_bytes("weights", i) for i in paged)
    crosses += plan.host_gradient_slots * 4 * plan.fragments[1].size
    # The rest are the norms, and pages that are not full.
    assert crosses <= life.pinned <= 1.01 * crosses


def test_system_that_refuses_to_pin_memory_trains_all_the_same(card):
    life = card(live_through, card_plan(dtype="float32"), refuses_to_pin=True)
    assert life.pinned == 0 and "last step" in life.phases


SMALL = replace(preset("gpt2-124m"), context=256)
LARGE = replace(preset("gpt3-13b"), context=256, vocabulary=1024)


@pytest.mark.slow  # it builds many engines, only to count their kernels
@pytest.mark.parametrize("model", [pytest.param(SMALL, id="124M"), pytest.param(LARGE, id="13B")])
def test_block_launches_at_most_half_more_kernels_than_plain_torch(model, card):
    for dtype in ("bfloat16", "float32"):
        ours, plain = (card(count, model, dtype) for count in (launches_per_block, plain_launches))
        assert ours <= min(90, 1.5 * plain), f"{dtype}: {ours} instead of {plain}"
        if model == SMALL:
            priced = sum(architecture_of(model).block_kernels[dtype])
            assert ours == priced, "the planner prices as many"


def test_products_measured_on_a_card_outlast_their_launch_and_are_aligned(card):
    """The fastest card computes 10^15 FLOPs a second; a launch takes some 10 microseconds."""
    flops, unaligned = card(probe_products, "bfloat16", (512, 4096), (2048, 50257))
    assert len(flops) == 6 and all(work > 3e10 for work in flops.values())
    assert not unaligned
