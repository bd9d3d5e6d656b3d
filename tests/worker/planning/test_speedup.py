"""Tests of the speed-up: measured points are given back, and nothing is stated beyond them."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from line_rounds import line_rounds

from barnraise.planning.lines import HOME_LINE, Line
from barnraise.planning.speedup import (
    PAYS_FROM,
    Fit,
    estimate_speedup,
    read_fit,
)
from barnraise.spec import Recipe, RunSpec, preset

CURVES = {
    (True, 2): ((100.0, 1.8), (200.0, 1.9)),
    (True, 4): ((10.0, 0.8), (33.0, 1.5), (100.0, 2.5)),
    (False, 4): ((50.0, 0.9), (286.0, 2.6)),
}
FIT = Fit("a toy", CURVES)
SPEC = RunSpec(preset("gpt2-124m"), recipe=Recipe(codec="auto", token_budget=20 * 124_000_000))


def with_budget(tokens: int) -> RunSpec:
    return replace(SPEC, recipe=replace(SPEC.recipe, token_budget=tokens))


@given(st.sampled_from(sorted(CURVES)), st.floats(1, 1e6), st.floats(1, 1e6))
def test_fit_interpolates_and_gives_back_what_was_measured(key, one, other):
    is_dense, machines = key
    points = CURVES[key]
    for rounds, speedup in points:
        assert FIT.speedup(machines, rounds, is_dense) == speedup
    few, many = sorted((one, other))
    if few < points[0][0]:
        is_most = machines == 4  # else more machines and one bound it
        assert (FIT.speedup(machines, few, is_dense) is None) == (is_most or few < 10)
    else:
        assert FIT.speedup(machines, few, is_dense) <= FIT.speedup(machines, many, is_dense)
    assert FIT.speedup(machines, 1e9, is_dense) == points[-1][1]


@given(st.integers(2, 4), st.floats(100, 1e6))
def test_fit_interpolates_machines_and_states_nothing_beyond(machines, rounds):
    two, speedup, four = (FIT.speedup(count, rounds, True) for count in (2, machines, 4))
    assert two <= speedup <= four
    assert FIT.speedup(5, rounds, True) is None
    assert FIT.speedup(1, rounds, True) == 1.0


def test_rounds_of_a_line_do_not_depend_on_the_model():
    """The closed form's examples: home lines, 24,000 tokens/s, 20 tokens a parameter."""
    rounds = [round(line_rounds(HOME_LINE, n, 24_000, 20, 0.252)) for n in (4, 8, 16)]
    assert rounds == [413, 89, 21]
    line = Line("line", 15, 112, 0.023)
    by_model = [
        estimate_speedup(
            RunSpec(
                preset(name),
                recipe=replace(
                    SPEC.recipe,
                    token_budget=20 * preset(name).parameters,
                    codec="dense2",
                    round_steps=1,
                    step_sequences=sequences,
                ),
            ),
            24_000,
            line,
            8,
            FIT,
        ).rounds
        for name, sequences in (("gpt2-124m", 8), ("gpt2-1.5b", 1), ("gpt2-355m", 32))
    ]
    assert by_model == [pytest.approx(89, rel=0.01)] * 3


def test_estimate_states_by_how_much_a_run_ends_sooner():
    estimate = estimate_speedup(SPEC, 24_000, HOME_LINE, 4, FIT)
    assert (estimate.speedup, estimate.basis) == (2.5, "a toy")
    assert estimate.sentence == (
        "With 4 machines on home lines this run ends 2.5 × sooner than with one, at the same loss."
    )


def test_estimate_names_what_would_pay_where_joining_does_not():
    spec = replace(SPEC, recipe=replace(SPEC.recipe, codec="dense2"))
    estimate = estimate_speedup(spec, 500_000, Line("slow", 11, 112), 4, FIT)
    assert estimate.speedup < PAYS_FROM and 10 < estimate.rounds < 20
    assert estimate.sentence == (
        "With 4 machines on lines of 11 Mb/s up, 112 down each would be heard 15 times in the "
        "whole run: it would not end sooner than with one. It would with lines of 30 Mb/s up, "
        "with a member with 1 Gb/s that carries for others or at 40 tokens a parameter."
    )
    for remedied in (
        estimate_speedup(spec, 500_000, Line("wider", 30, 112), 4, FIT),
        estimate_speedup(
            replace(spec, recipe=replace(spec.recipe, token_budget=40 * spec.model.parameters)),
            500_000,
            Line("slow", 11, 112),
            4,
            FIT,
        ),
    ):
        assert remedied.speedup >= PAYS_FROM, "each remedy holds by the same function"


def test_estimate_outside_of_what_was_measured_states_no_number():
    estimate = estimate_speedup(SPEC, 24_000, HOME_LINE, 5, FIT)
    assert estimate.speedup is None and estimate.basis == ""
    assert "was not measured for that" in estimate.sentence and "×" not in estimate.sentence


@given(
    machines=st.integers(0, 10_000),
    rate=st.floats(0, 1e12),
    budget=st.integers(0, 10**15),
    up=st.floats(1e-6, 1e6),
)
def test_estimate_of_any_run_is_a_sentence_or_nothing(machines, rate, budget, up):
    estimate = estimate_speedup(with_budget(budget), rate, Line("any", up, up), machines, FIT)
    if machines < 2 or not rate or not budget:
        assert estimate.sentence == ""
    assert math.isfinite(estimate.rounds) and (estimate.rounds >= 1 or not estimate.sentence)
    assert not estimate.sentence or estimate.sentence.endswith(".")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 0, "basis": "", "points": []}', '{"version": 1, "points": [1]}'],
)
def test_fit_that_is_missing_or_of_another_version_is_none(tmp_path, text):
    path = tmp_path / "fit.json"
    assert read_fit(path) is None
    path.write_text(text)
    assert read_fit(tmp_path / "." / "fit.json") is None


def test_committed_fit_is_of_this_version():
    fit = read_fit()
    assert fit is not None and fit.basis and {count for _, count in fit.curves} >= {2, 4, 8}
