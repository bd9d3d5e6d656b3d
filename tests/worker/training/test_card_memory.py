"""A plan takes of a GPU's memory what it states, and is refused where that is no longer free."""

from dataclasses import replace

import pytest
from helpers.cuda.card_plans import card_plan, on_two_cards
from helpers.worker.plans import tiny_plan

from barnraise.errors import MemoryShortageError
from barnraise.planning.budgets import WORKSPACE_BYTES
from barnraise.spec import Recipe
from barnraise.training import card_memory
from barnraise.training.card_memory import claim_card_memory

GB = 10**9
PLAN = replace(tiny_plan(device_bytes=5 * GB), device="cuda")


@pytest.fixture
def card(monkeypatch):
    """Yield a card of 8 GB: what is free of it, and the limits that torch was given."""
    limits, free = [], [6 * GB]
    monkeypatch.setattr(card_memory, "total_memory", lambda device: 8 * GB * (device == "cuda"))
    monkeypatch.setattr(card_memory, "free_memory", lambda device: free[0])
    monkeypatch.setattr(card_memory, "limit_memory", lambda device, size: limits.append(size))
    return free, limits


def test_torch_is_bound_to_the_plan_and_its_reserve_without_a_limit(card):
    claim_card_memory(PLAN, Recipe())
    (limit,) = card[1]
    assert 5 * GB + WORKSPACE_BYTES < limit < 1.1 * 5 * GB


def test_memory_that_another_program_took_since_the_plan_is_a_shortage(card):
    card[0][0] = 4 * GB
    with pytest.raises(MemoryShortageError, match="has 4 GB of memory free, and the plan") as e:
        claim_card_memory(PLAN, Recipe())
    assert e.value.device and "takes 5 GB" in str(e.value) and not card[1]


def test_each_of_several_cards_is_bound_to_what_it_is_dealt(card, monkeypatch):
    plan = replace(
        on_two_cards(card_plan(), second=1), device_bytes=5 * GB, card_bytes=(5 * GB, 3 * GB)
    )
    monkeypatch.setattr(card_memory, "total_memory", lambda device: 8 * GB)
    claim_card_memory(plan, Recipe())
    first, second = card[1]
    assert second < 4 * GB < first
    card[0][0] = 4 * GB
    with pytest.raises(MemoryShortageError, match="the GPU cuda has 4 GB of memory free"):
        claim_card_memory(plan, Recipe())


def test_moments_that_wait_for_steps_count_where_machines_agree(card):
    recipe = Recipe(strategy="decentralized-adam", mixing_accumulation=4)
    claim_card_memory(PLAN, Recipe())
    claim_card_memory(PLAN, recipe)
    assert card[1][1] > card[1][0]


def test_plan_for_the_cpu_claims_nothing(card):
    claim_card_memory(replace(PLAN, device="cpu"), Recipe())
    assert not card[1]
