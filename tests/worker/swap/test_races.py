"""Threads and streams of the CUDA path never touch the same bytes in an uncertain order."""

import pytest
from helpers.cuda.card_damages import DAMAGES
from helpers.cuda.card_plans import card_plan, find_races, on_disk, on_two_cards
from helpers.effort import one_in

from barnraise.spec import ModelSpec

# Groups that may run at one time: the two long ones take seven minutes of the processor each.
MEMORY_GROUP = pytest.mark.xdist_group("races in memory")
DISK_GROUP = pytest.mark.xdist_group("races on disk")
FAKE_CARD_GROUP = pytest.mark.xdist_group("fake card")

SMALL = ModelSpec(layers=5, width=64, heads=2, context=16, vocabulary=256)
FORMATS = [dict(dtype="bfloat16"), dict(dtype="float32"), dict(dtype="bfloat16", moments_bits=8)]
IN_MEMORY = [
    dict(resident=resident, clipping=clipping, boundaries=boundaries, group=group, **formats)
    for clipping in ("exact", "layer", "none")
    for boundaries in ("device", "host")
    for resident, group in ((0, 1), (0, 2), (3, 1), (7, 1))
    for formats in FORMATS
] + [
    dict(resident=7, retained_blocks=retained, clipping=clipping, boundaries=boundaries, **formats)
    for clipping in ("exact", "layer")
    for boundaries in ("device", "host")
    for retained in (2, 5)
    for formats in FORMATS[:2]
]
MUON = [
    dict(
        resident=resident,
        clipping=clipping,
        boundaries="device",
        group=group,
        optimizer="muon",
        **formats,
    )
    for clipping in ("layer", "exact")
    for resident, group in ((3, 1), (0, 2))
    for formats in FORMATS[:2]
]
ON_DISK = (
    [
        (dict(resident=resident, clipping=clipping, boundaries=boundaries), weights, safety, {})
        for clipping in ("exact", "layer", "none")
        for boundaries in ("device", "host")
        for resident, weights in ((0, "disk"), (0, "host"), (3, "disk"))
        for safety in ("exact", "restart")
    ]
    + [
        (changes, weights, safety, {})
        for changes in MUON[:4]
        for weights, safety in (("disk", "exact"), ("host", "restart"))
    ]
    + [
        # Gradients wait in RAM instead of going to disk.
        (
            dict(clipping="exact", boundaries=boundaries, **formats),
            weights,
            safety,
            dict(gradients="host", host_gradient_slots=SMALL.layers),
        )
        for boundaries in ("device", "host")
        for formats in FORMATS
        for weights in ("disk", "host")
        for safety in ("exact", "restart")
    ]
)


def plan_of(**changes):
    """Return a plan of the small model with three micro-batches."""
    return card_plan(SMALL, micro_batches=3, sequences=2, **changes)


@FAKE_CARD_GROUP
@pytest.mark.parametrize("behind", one_in(2, [True, False]))
def test_boundaries_in_ram_have_no_races(card, behind, tmp_path):
    plan = plan_of(resident=3, boundaries="host", near_inputs=1)
    assert not card(find_races, plan, tmp_path, behind)


@FAKE_CARD_GROUP
def test_gradients_that_wait_for_the_next_forward_have_no_races(card, tmp_path):
    plan = plan_of(resident=2, clipping="layer", boundaries="host", host_gradient_slots=5)
    assert not card(find_races, plan, tmp_path)


@MEMORY_GROUP
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "behind"),
    [
        (changes, behind)
        for changes in [*IN_MEMORY, *MUON]
        # How far the card has come matters to boundaries in RAM alone: nothing else asks for it.
        for behind in ([False, True] if changes["boundaries"] == "host" else [False])
    ],
    ids=str,
)
def test_plans_in_memory_have_no_races(changes, behind, card, tmp_path):
    assert not card(find_races, plan_of(**changes), tmp_path, behind)


@FAKE_CARD_GROUP
@pytest.mark.slow
def test_muon_of_blocks_in_ram_and_on_disk_has_no_races(card, tmp_path):
    for plan in (plan_of(**MUON[0]), on_disk(plan_of(**MUON[2]), tile=8192)):
        assert not card(find_races, plan, tmp_path / plan.crash_safety)


@DISK_GROUP
@pytest.mark.slow
@pytest.mark.parametrize(("changes", "weights", "safety", "more"), ON_DISK, ids=str)
def test_plans_on_disk_have_no_races(changes, weights, safety, more, card, tmp_path):
    plan = on_disk(plan_of(**changes), weights, safety, tile=8192, **more)
    plan.validate()
    assert not card(find_races, plan, tmp_path)


@FAKE_CARD_GROUP
@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_to_the_order_is_found(damage, card, tmp_path):
    plan = plan_of(boundaries="host")
    if damage.startswith("add"):
        plan = on_two_cards(plan)
    if damage.startswith(("fetch", "store", "read")):
        plan = on_disk(plan_of(clipping="layer"), tile=8192)
    assert not card(find_races, plan, tmp_path)
    assert card(find_races, plan, tmp_path, damage=damage)
