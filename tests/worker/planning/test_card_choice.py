"""The planner chooses between one card and several, deals by speed, and says why."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from example_hardware import cpu_machine
from hypothesis import given
from hypothesis import strategies as st

from barnraise.cli.plan import PlanningOptions, assume_gpu
from barnraise.errors import PlanError
from barnraise.planning import memory_model
from barnraise.planning.card_choice import TAKEN, CardChoice, choose_cards, name_cards
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.program import LaneName, OperationKind, step_program
from barnraise.planning.render import build_plan_view, describe_plan
from barnraise.planning.search import deal_micro_batches, make_plan
from barnraise.planning.simulator import StepSimulation
from barnraise.spec import preset

HOST = cpu_machine(memory=64 * 10**9, cores=8, stream=4e10, adam=1.4e9)
MODEL = preset("gpt2-774m")
ONE_COPY = Limits(engine="swap")
# Tests share choices, as each one takes seconds of planning.
pytestmark = pytest.mark.xdist_group("choices of cards")


def machine(*cards: tuple[int, float]) -> Hardware:
    """Return a PC with GPUs of so many GB and TFLOP/s."""
    first, *others = (
        replace(
            assume_gpu(HOST, PlanningOptions(gpu_tflops=speed), size * 10**9),
            device_index=index,
            name=f"GPU {size} GB",
        )
        for index, (size, speed) in enumerate(cards)
    )
    return replace(first, others=tuple(others))


@cache
def choose_from_one_copy(hardware: Hardware, limits: Limits = ONE_COPY) -> CardChoice:
    """Return the choice for a step of 32 sequences, with one copy of the state."""
    return choose_cards(hardware, MODEL, limits, 32)


@given(count=st.integers(3, 64), seconds=st.lists(st.floats(0.1, 10), min_size=2, max_size=3))
def test_deal_ends_soonest_and_gives_each_device_one(count, seconds):
    dealt = deal_micro_batches(count, seconds)
    assert sum(dealt) == count and min(dealt) >= 1
    last = max(number * each for number, each in zip(dealt, seconds, strict=True))
    for giver in range(len(seconds)):
        for receiver in range(len(seconds)):
            if giver != receiver and dealt[giver] > 1:
                moved = list(dealt)
                moved[giver] -= 1
                moved[receiver] += 1
                ends = (number * each for number, each in zip(moved, seconds, strict=True))
                assert max(ends) >= last * (1 - 1e-9)


def test_device_of_a_third_of_the_speed_gets_a_quarter():
    assert deal_micro_batches(16, [1.0, 3.0]) == [12, 4]


def test_cards_that_help_are_used_and_why_not_the_others():
    choice = choose_from_one_copy(machine((24, 60), (24, 60), (12, 60)))
    assert [share.name for share in choice.plan.devices] == ["cuda", "cuda:1", "cuda:2"]
    choice.plan.validate()
    taken = [each for each in choice.choices if each.verdict == TAKEN]
    assert [each.cards for each in taken] == ["2 × GPU 24 GB and GPU 12 GB"]
    assert all("slower, limited by" in reason for reason in choice.refused)
    assert choice.plan.tokens_per_second == max(each.tokens_per_second for each in choice.choices)


def test_card_that_would_slow_the_others_down_is_left_out():
    choice = choose_cards(machine((12, 3), (24, 60)), preset("gpt2-124m"), step_sequences=16)
    assert choice.plan.device == "cuda:1" and not choice.plan.devices
    assert any(reason.startswith("GPU 24 GB and GPU 12 GB") for reason in choice.refused)


def test_each_card_holds_what_it_is_dealt():
    hardware = machine((24, 60), (12, 20))
    plan = choose_from_one_copy(hardware).plan
    first, second = plan.devices
    assert first.micro_batches > second.micro_batches
    assert list(plan.card_bytes) == memory_model.all_device_bytes(plan)
    for size, card in zip(plan.card_bytes, hardware.cards, strict=True):
        assert size <= card.device_memory_free
    assert plan.slots == MODEL.layers, "what remains of the memory keeps weights for the backward"


def test_model_that_fits_on_no_card_is_refused_with_advice():
    with pytest.raises(PlanError, match=r"does not fit.*What would fit"):
        choose_cards(
            machine((24, 60), (24, 60)), preset("gpt3-175b"), Limits(memory=8 * 10**9, disk=10**9)
        )


def test_step_smaller_than_the_number_of_cards_uses_fewer():
    hardware = machine((24, 60), (24, 60), (24, 60))
    choice = choose_cards(hardware, preset("gpt2-124m"), step_sequences=2)
    assert len(choice.plan.devices) <= 2


@pytest.mark.parametrize("clipping", ["exact", "layer", "none"])
def test_program_of_several_devices_adds_in_their_order(clipping):
    hardware = machine((24, 60), (24, 60), (24, 60))
    plan = make_plan(hardware, MODEL, Limits(clipping=clipping), step_sequences=16)
    operations = step_program(plan, pending=plan.defers_updates).operations
    for kind in (OperationKind.FORWARD, OperationKind.BACKWARD, OperationKind.OFFLOAD):
        devices = [op.device for op in operations if op.kind is kind]
        assert devices == [2, 1, 0] * (len(devices) // 3), "the submitting thread computes last"
    added = [op for op in operations if op.kind is OperationKind.ADD]
    assert len(added) == len(plan.fragments)
    for op in added:
        assert op.lane is LaneName.OPTIMIZER
        parts = [resource for resource in op.uses if resource[0] == "added gradient"]
        assert all(one[1] < two[1] for one, two in pairwise(parts)) and len(parts) == 2


def test_price_has_each_link_the_added_gradients_and_shared_memory():
    def seconds(hardware: Hardware, traffic: float = 1.0) -> float:
        slow = replace(hardware, stream=hardware.stream * traffic)
        plan = choose_from_one_copy(hardware, replace(ONE_COPY, clipping="exact")).plan
        assert plan.devices
        return StepSimulation(plan, slow).step_seconds

    both = machine((24, 60), (24, 60))
    assert seconds(both, 0.01) > 2 * seconds(both), "the RAM's bandwidth is shared"
    narrow = replace(both.others[0], to_device=1e9, from_device=1e9)
    plan = choose_from_one_copy(both).plan
    slowed = StepSimulation(plan, replace(both, others=(narrow,))).step_seconds
    assert slowed > StepSimulation(plan, both).step_seconds


def test_plan_names_all_its_cards_and_their_shares():
    hardware = machine((24, 60), (24, 60))
    plan = choose_from_one_copy(hardware).plan
    assert "on 2 GPUs, fed from one copy in memory" in describe_plan(plan)
    counts = " + ".join(str(share.micro_batches) for share in plan.devices)
    assert f"({counts})" in describe_plan(plan)
    view = build_plan_view(plan, hardware)
    assert view.device == "2 × GPU 24 GB" and view.device_bytes == sum(plan.card_bytes)
    assert name_cards(hardware.cards[:1]) == "GPU 24 GB"
