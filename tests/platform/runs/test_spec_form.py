"""Test budgets as people type them."""

import pytest

from barnraise.errors import SpecError
from barnraise.spec import preset
from coordinator.runs.spec_form import TokensPerParameter, parse_budget, spec_from_fields


@pytest.mark.parametrize(
    ("typed", "tokens"),
    [
        ("500M", 500_000_000),
        ("0.5B", 500_000_000),
        (" 1,5 k ", 15_000),
        (".5 m", 500_000),
        ("1.5t", 1_500_000_000_000),
        ("2000000", "2000000"),
        ("1e6", "1e6"),
        ("20x", TokensPerParameter(20)),
        ("lots", "lots"),
        (7, 7),
        (None, None),
    ],
)
def test_parse_budget_reads_units_and_leaves_the_rest(typed, tokens):
    assert parse_budget(typed) == tokens


def test_budget_in_tokens_for_each_parameter_follows_the_model():
    spec = spec_from_fields({"recipe.token_budget": "20x", "model.layers": 3}, "gpt-nano")
    assert spec.recipe.token_budget == 20 * spec.model.parameters
    assert spec.model.parameters < preset("gpt-nano").parameters
    assert spec.recipe.warmup_tokens <= spec.recipe.token_budget // 20


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"recipe.token_budget": "lots"}, "such as 500M, or tokens for each parameter"),
        ({"recipe.token_budget": "9" * 400 + "B"}, "such as 500M"),
        ({"recipe.token_budget": "999999999999999x"}, "must be between"),
        ({"recipe.token_budget": "20x", "start.model": "owner/gpt"}, "must be in tokens"),
    ],
)
def test_budget_that_is_none_is_refused_at_its_field(fields, sentence):
    with pytest.raises(SpecError) as refused:
        spec_from_fields(fields)
    assert sentence in refused.value.problems["recipe.token_budget"]
