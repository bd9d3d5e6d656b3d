"""Test specs from forms: numbers and budgets as people type them, and values that are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.errors import SpecError
from barnraise.spec import PRESETS, RunSpec, preset
from coordinator.runs.spec_form import (
    FIELDS,
    MUON_RATES,
    TokensPerParameter,
    parse_budget,
    spec_from_fields,
)


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


@given(
    st.dictionaries(
        st.sampled_from(["model.layers", "recipe.clip", "seed", "text.held_out", "x"]), st.text()
    )
)
def test_any_form_input_gives_a_spec_or_problems(fields):
    try:
        spec = spec_from_fields(fields)
    except SpecError as refused:
        assert refused.problems
    else:
        assert RunSpec.from_json(spec.to_json()) == spec


def test_numbers_with_separators_and_suffixes_are_parsed():
    spec = spec_from_fields(
        {"recipe.token_budget": "1e6", "recipe.learning_rate": "3e-4", "model.layers": " 1_2 "}
    )
    assert (spec.recipe.token_budget, spec.recipe.learning_rate, spec.model.layers) == (
        1_000_000,
        3e-4,
        12,
    )


def test_muon_is_offered_with_rates_of_its_own():
    muon = spec_from_fields({"recipe.optimizer": "muon"}).recipe
    assert (muon.learning_rate, muon.matrix_rate) == (4e-3, 5e-3)
    for name, rate in MUON_RATES.items():
        assert str(rate) in FIELDS[f"recipe.{name}"].metadata["help"], "people are told the rate"
    named = spec_from_fields({"recipe.optimizer": "muon", "recipe.matrix_rate": "0.02"}).recipe
    assert (named.learning_rate, named.matrix_rate) == (4e-3, 0.02)
    chosen = {"recipe.optimizer": "muon", "recipe.learning_rate": "4e-3"}
    assert spec_from_fields(chosen).recipe.peak_matrix_rate == pytest.approx(0.01)
    rated = spec_from_fields({**chosen, "recipe.matrix_rate": "0.02"}).recipe
    assert (rated.learning_rate, rated.matrix_rate) == (4e-3, 0.02)
    with pytest.raises(SpecError, match="must be a number, not 'fast'"):
        spec_from_fields({**chosen, "recipe.matrix_rate": "fast"})
    with pytest.raises(SpecError, match="only Muon has a learning rate of its own"):
        spec_from_fields({"recipe.matrix_rate": "0.02"})


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_run(name):
    assert spec_from_fields({}, name).model == preset(name)


def test_max_tokens_per_update_defaults_to_sixteen_rounds():
    from coordinator.runs.spec_form import spec_from_fields

    spec = spec_from_fields({"recipe.round_steps": "20"})
    assert spec.max_tokens_per_update == 16 * 20 * spec.recipe.step_sequences * spec.model.context
    assert spec_from_fields({"max_tokens_per_update": "500_000"}).max_tokens_per_update == 500_000
