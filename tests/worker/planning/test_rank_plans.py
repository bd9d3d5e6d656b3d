"""Ranks that share one model: their price, their memory, and when the planner chooses them."""

from dataclasses import replace

import pytest
from example_hardware import cpu_machine

from barnraise.cli.plan import PlanningOptions, assume_gpu
from barnraise.errors import PlanError
from barnraise.planning.card_choice import TAKEN, UNMEASURED, choose_cards
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.rank_plans import plan_ranks
from barnraise.planning.rank_rules import explain_ranks, explain_split
from barnraise.planning.render import build_choices_table, build_plan_view, describe_plan
from barnraise.spec import ADAMW, MUON, preset

HOST = cpu_machine(memory=128 * 10**9, cores=8, stream=4e10, adam=1.4e9)
SMALL, LARGE = preset("gpt2-124m"), preset("gpt3-2.7b")


def cards(*sizes: int, link: str = "20GB") -> Hardware:
    """Return a PC with GPUs of so many GB."""
    first, *others = (
        replace(
            assume_gpu(HOST, PlanningOptions(gpu_link=link), size * 10**9),
            device_index=index,
            name=f"GPU {size} GB",
        )
        for index, size in enumerate(sizes)
    )
    return replace(first, others=tuple(others))


def test_state_of_each_rank_falls_with_their_number():
    two, eight = (plan_ranks(cards(*[3] * n), SMALL, step_sequences=n) for n in (2, 8))
    for plan in (two, eight):
        plan.validate()
        assert plan.step_tokens == len(plan.ranks) * SMALL.context
        assert plan.device_bytes <= 3 * 10**9
    assert eight.device_bytes < two.device_bytes


def test_more_ranks_train_faster():
    two, four = (plan_ranks(cards(*[24] * n), SMALL, step_sequences=32) for n in (2, 4))
    assert four.tokens_per_second > 1.5 * two.tokens_per_second


def test_slow_links_make_collectives_the_bottleneck():
    fast = plan_ranks(cards(24, 24), SMALL, step_sequences=4)
    slow = plan_ranks(cards(24, 24, link="500MB"), SMALL, step_sequences=4)
    assert fast.bottleneck == "compute" and slow.bottleneck == "link"
    assert slow.tokens_per_second < fast.tokens_per_second


def test_choice_prices_all_engines_and_states_why_each_was_not_taken():
    """Ranks are faster here, but need NCCL, which only the owner chooses."""
    machine = cards(24, 24)
    choice = choose_cards(machine, SMALL, step_sequences=32)
    engines = [each.engine for each in choice.choices]
    assert engines == ["swap", "swap", "swap", "sharded", "sharded, tensor 2"]
    (taken,) = [each for each in choice.choices if each.verdict == TAKEN]
    assert taken.engine == "swap" and not choice.plan.ranks
    fastest = max(choice.choices, key=lambda each: each.tokens_per_second)
    assert fastest.engine == "sharded" and fastest.verdict == UNMEASURED
    sharded = choose_cards(machine, SMALL, Limits(engine="sharded"), 32)
    assert sharded.plan.tokens_per_second == fastest.tokens_per_second
    assert "on 2 GPUs, each with a part of the state" in describe_plan(sharded.plan)
    view = build_plan_view(sharded.plan, machine)
    assert view.device == "2 × GPU 24 GB" and view.device_bytes == 2 * sharded.plan.device_bytes
    assert build_choices_table(choice).row_count == len(engines)


def test_cards_that_hold_no_share_swap_over_one_copy():
    choice = choose_cards(cards(24, 24), LARGE, step_sequences=32)
    assert len(choice.plan.devices) == 2 and not choice.plan.ranks
    whys = [each.verdict for each in choice.choices if each.engine.startswith("sharded")]
    assert all("of each card's memory, and may use" in why for why in whys)


def test_owner_chooses_the_engine_and_the_split():
    machine = cards(24, 24)
    swap = choose_cards(machine, SMALL, Limits(engine="swap"), 32)
    assert not swap.plan.ranks and all(each.engine == "swap" for each in swap.choices)
    split = choose_cards(machine, SMALL, Limits(engine="sharded", tensor=2), 32)
    assert split.plan.tensor == 2 and len(split.choices) == 1
    assert "2 of them splitting each layer" in describe_plan(split.plan)
    with pytest.raises(PlanError, match="leave out --engine sharded"):
        choose_cards(cards(24), SMALL, Limits(engine="sharded"))
    with pytest.raises(PlanError, match="of each card's memory"):
        choose_cards(machine, LARGE, Limits(engine="sharded"), 32)


def test_processes_of_a_cpu_share_a_model_if_the_owner_wants_it():
    machine = replace(HOST, others=(HOST, HOST, HOST))
    plan = choose_cards(machine, SMALL, Limits(engine="sharded"), 8).plan
    assert plan.ranks == ("cpu",) * 4 and not plan.device_bytes
    assert "on 4 processes" in describe_plan(plan)


def test_muon_takes_less_memory_of_ranks_and_more_time():
    """It has no second moments of matrices, and each rank computes with all of them."""
    two = cards(24, 24)
    adam, muon = (
        plan_ranks(two, SMALL, step_sequences=2, optimizer=name) for name in (ADAMW, MUON)
    )
    assert muon.optimizer == MUON and muon.device_bytes < adam.device_bytes
    assert muon.step_seconds > adam.step_seconds


def test_refusals_of_ranks_are_sentences():
    limits = {
        "32 bits": Limits(moments_bits=8),
        "whole gradient's norm": Limits(clipping="layer"),
    }
    for words, limit in limits.items():
        assert words in explain_ranks(SMALL, limit, 8, 2, 1)
    assert "cannot share 7 sequences" in explain_ranks(SMALL, Limits(), 7, 2, 1)
    assert "groups of 2" in explain_ranks(SMALL, Limits(), 8, 3, 2)
    assert "5 ranks cannot share 12 heads evenly" in explain_split(SMALL, 5)
    model = preset("smollm2-135m")
    reason = explain_split(replace(model, heads=8, key_value_heads=2), 4)
    assert "4 ranks cannot share 2 key-value heads evenly: --tensor 2 divides them" in reason
