"""Two fake cards over one host copy: devices, bytes, waits of the host, and races."""

import pytest
from helpers.cuda.card_damages import DAMAGES
from helpers.cuda.card_plans import card_plan, find_races, live_through, on_disk, on_two_cards
from helpers.effort import one_in

from barnraise.planning import memory_model
from barnraise.spec import ModelSpec

pytestmark = pytest.mark.xdist_group("fake card")

SMALL = ModelSpec(layers=5, width=64, heads=2, context=16, vocabulary=256)
PLANS = {
    "disk, fp32": on_disk(card_plan(dtype="float32", micro_batches=4)),
    "layer, boundaries in RAM": card_plan(clipping="layer", boundaries="host", micro_batches=4),
    "exact, all slots": card_plan(micro_batches=3, slots=2),
    "8-bit moments, none": card_plan(moments_bits=8, clipping="none", micro_batches=3),
}
RACING = [
    dict(clipping="exact", boundaries="host"),
    dict(clipping="layer"),
    dict(clipping="exact", optimizer="muon", dtype="float32"),
    dict(clipping="none", group=2),
]
DAMAGED = [
    "load ignores its source",
    "load ignores its slot",
    "offload ignores the gradient",
    "offload ignores its target",
    "forward ignores the slots",
    "add ignores what it adds",
    "add ignores its sum",
]


@pytest.mark.parametrize("name", one_in(4, list(PLANS)))
def test_life_on_two_cards_keeps_the_rules(name, card, tmp_path):
    """Nothing passes from card to card, and each holds what the plan predicts."""
    plan = on_two_cards(PLANS[name])
    plan.validate()
    life = card(live_through, plan, tmp_path)
    assert not life.mixes
    for number, predicted in enumerate(memory_model.all_device_bytes(plan)):
        peak = life.peak_of(number)
        assert 0.95 * predicted <= peak <= predicted, f"{number}: {predicted}: {life.highest}"
    assert life.left <= memory_model.scratch_bytes(plan, "cuda")
    if not plan.on_disk:
        assert len(life.phases["step"].waits) == 2, "one for each card"


@pytest.mark.parametrize("changes", one_in(4, RACING), ids=str)
def test_two_cards_have_no_races(changes, card, tmp_path):
    plan = on_two_cards(card_plan(SMALL, micro_batches=3, sequences=2, **changes))
    assert not card(find_races, plan, tmp_path)


@pytest.mark.slow
def test_two_cards_with_state_on_disk_have_no_races(card, tmp_path):
    plan = on_disk(card_plan(SMALL, micro_batches=3, sequences=2), tile=8192)
    assert not card(find_races, on_two_cards(plan), tmp_path)


@pytest.mark.parametrize("damage", one_in(7, DAMAGED))
def test_damage_to_the_order_of_two_cards_is_found(damage, card, tmp_path):
    assert damage in DAMAGES
    plan = on_two_cards(card_plan(SMALL, micro_batches=3, sequences=2, slots=2))
    assert card(find_races, plan, tmp_path, damage=damage)
