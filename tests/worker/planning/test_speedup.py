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
    SpeedupEstimate,
    estimate_speedup,
    read_fit,
)
from barnraise.spec import DECENTRALIZED_ADAM, Recipe, RunSpec, preset

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
        assert FIT.speedup(machines, few, is_dense) is None
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


@pytest.mark.parametrize(
    ("machines", "rate", "fit", "heard", "lack"),
    [
        (5, 24_000, FIT, "2,088 times", "so many machines"),
        (4, 7_000_000, FIT, "once", "so few rounds"),
        (2, 24_000, Fit(), "18,921 times", "so many machines"),
    ],
)
def test_estimate_outside_of_what_was_measured_states_no_number(machines, rate, fit, heard, lack):
    estimate = estimate_speedup(SPEC, rate, HOME_LINE, machines, fit)
    assert estimate.speedup is None and estimate.basis == ""
    assert estimate.sentence == (
        f"With {machines} machines on home lines each is heard {heard} in the whole run: how much "
        f"sooner it ends than with one, at the same loss, was not measured for {lack}."
    )


BUDGETS = st.integers(0, 10**15) | st.floats(0.1, 500).map(lambda tokens: int(tokens * 124e6))
RATES = st.floats(100, 1e6) | st.sampled_from([0.0, -1.0, 1e-300, 1e12, math.inf, math.nan])
FITS = st.sampled_from([FIT, Fit(), read_fit()])


@given(
    machines=st.integers(1, 64) | st.integers(-1, 10_000),
    rate=RATES,
    budget=BUDGETS,
    uplinks=st.lists(st.floats(0.5, 1000) | st.floats(1e-6, 1e6), min_size=2, max_size=2),
    codec=st.sampled_from(["auto", "dense2", "top64x2"]),
    fit=FITS,
)
def test_estimate_of_any_run_is_true_or_nothing(machines, rate, budget, uplinks, codec, fit):
    """No sentence without a run, and no speed-up above the machines.

    More uplink lowers none either, as long as the machines compress alike.
    """
    spec = replace(SPEC, recipe=replace(SPEC.recipe, token_budget=budget, codec=codec))
    slow, fast = (
        estimate_speedup(spec, rate, Line("any", up, max(up, 112)), machines, fit)
        for up in sorted(uplinks)
    )
    for estimate in (slow, fast):
        if machines < 2 or not 0 < rate < math.inf or not budget or estimate.rounds < 1:
            assert estimate == SpeedupEstimate()
            continue
        assert math.isfinite(estimate.rounds) and estimate.sentence.endswith(".")
        assert "nan" not in estimate.sentence and "inf" not in estimate.sentence
        assert (estimate.speedup is None) == (estimate.basis == "")
        assert estimate.speedup is None or 0 < estimate.speedup <= machines
    if slow.speedup is not None and codec != "auto":
        assert fast.speedup is not None and fast.speedup >= slow.speedup * (1 - 1e-9)


def test_estimate_of_machines_that_average_weights_states_nothing():
    spec = replace(SPEC, recipe=replace(SPEC.recipe, strategy=DECENTRALIZED_ADAM))
    assert estimate_speedup(spec, 24_000, HOME_LINE, 4, FIT) == SpeedupEstimate()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 0, "basis": "", "points": []}', '{"version": 1, "points": [1]}'],
)
def test_fit_that_is_missing_or_of_another_version_is_empty(tmp_path, text):
    path = tmp_path / "fit.json"
    assert read_fit(path) == Fit()
    path.write_text(text)
    assert read_fit(tmp_path / "." / "fit.json") == Fit()


def test_committed_fit_is_of_this_version():
    fit = read_fit()
    assert fit.basis and {count for _, count in fit.curves} >= {2, 4, 8}
    for points in fit.curves.values():
        speedups = [speedup for _, speedup in points]
        assert speedups == sorted(speedups), "more rounds end no later"
