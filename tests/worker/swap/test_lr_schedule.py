"""Tests of the learning-rate schedule."""

import dataclasses

import pytest

from barnraise.spec import Recipe
from barnraise.swap.lr_schedule import learning_rate_scale


def test_schedule_warms_up_peaks_once_and_ends_at_a_tenth():
    recipe = Recipe(token_budget=1_000_000, warmup_tokens=50_000)
    rates = [learning_rate_scale(recipe, tokens) for tokens in range(0, 1_200_000, 1000)]
    assert 0 < rates[0] <= 0.2, (
        "the first round must learn something: the ledger's clock stands still for all of it"
    )
    assert max(rates) == rates[50] == 1.0
    assert rates[:51] == sorted(rates[:51]) and rates[50:] == sorted(rates[50:], reverse=True)
    assert rates[-1] == rates[1000] == pytest.approx(0.1)


def test_schedule_edge_cases_of_warm_up_and_constant_rate():
    assert learning_rate_scale(Recipe(warmup_tokens=0), 0) == 1.0
    constant = dataclasses.replace(Recipe(), schedule="constant")
    assert learning_rate_scale(constant, constant.token_budget * 2) == 1.0
    long = Recipe(token_budget=1000, warmup_tokens=5000)
    assert [learning_rate_scale(long, tokens) < 1 for tokens in (0, 1000, 4999)] == [True] * 3
    assert learning_rate_scale(long, 6000) == pytest.approx(0.1)
