"""Tests of the round schedule: rounds as short and updates as dense as an uplink allows."""

import math
from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from barnraise.planning.compression_ladder import (
    COMPRESSION_LADDER,
    DEFAULT_SCHEME,
    LONG_ROUNDS,
    MIN_CARRY_ROUNDS,
    MIN_SPARSE_ROUNDS,
    SCHEMES,
)
from barnraise.planning.quantization_scheme import QuantizationScheme
from barnraise.planning.round_schedule import (
    FIRST_UPDATE_SECONDS,
    RoundSchedule,
    align_with_peers,
    choose_schedule,
    fit_to_uplink,
)
from barnraise.planning.update_header import TYPICAL_HEADER_BYTES
from barnraise.planning.uplink_budget import HEADER_SHARE, UPDATE_SHARE
from barnraise.spec import PRESETS, Recipe, RunSpec, preset

LINKS = st.floats(1e3, 1e10)  # bytes per second
SECONDS = st.floats(0.01, 600)
MODELS = st.sampled_from(PRESETS)
PARAMETERS = st.integers(10_000, 200_000_000_000)
PUSHES = st.integers(1, 8)
MAX_STEPS = 10_000


SPARSEST_SCHEME = SCHEMES[-1]


def budget(link: float, pushes: int = 1) -> float:
    """Return how fast a link sends updates if this machine sends so many copies of each."""
    return UPDATE_SHARE * link / pushes


def spec_of(recipe: Recipe, name: str = "gpt2-124m", max_steps: int = MAX_STEPS) -> RunSpec:
    """Return the spec of a run whose updates may state so many steps."""
    spec = RunSpec(preset(name), recipe=recipe)
    return replace(spec, max_tokens_per_update=max_steps * spec.step_tokens)


def required_rate(
    steps: int, scheme: QuantizationScheme, step_seconds: float, parameters: int, pushes: int
) -> float:
    """Return the bytes per second that send each update within its round."""
    update_bytes = scheme.payload_size(parameters) + TYPICAL_HEADER_BYTES
    return pushes * update_bytes / (steps * step_seconds)


def level_of(schedule: RoundSchedule) -> int:
    """Return the index of the level of the ladder that a schedule is on."""
    return next(
        i
        for i, level in enumerate(COMPRESSION_LADDER)
        if level.scheme == schedule.scheme and schedule.steps <= level.max_steps
    )


@given(LINKS, SECONDS, PARAMETERS, PUSHES, st.integers(1, MAX_STEPS))
def test_fit_to_uplink_update_is_sent_within_its_round(link, seconds, parameters, pushes, longest):
    schedule = fit_to_uplink(budget(link, pushes), seconds, parameters, longest)
    assert 1 <= schedule.steps <= longest
    rate = required_rate(schedule.steps, schedule.scheme, seconds, parameters, pushes)
    fits = rate <= budget(link) * (1 + 1e-9)
    assert fits or (schedule.steps, schedule.scheme) == (longest, SPARSEST_SCHEME)
    if budget(link) >= required_rate(longest, LONG_ROUNDS.scheme, seconds, parameters, pushes):
        assert fits


@given(LINKS, LINKS, SECONDS, PARAMETERS, PUSHES)
def test_fit_to_uplink_faster_link_sends_no_less(one, other, seconds, parameters, pushes):
    links = sorted((one, other))
    slow, fast = (fit_to_uplink(budget(link, pushes), seconds, parameters) for link in links)
    slow_rate, fast_rate = (
        required_rate(schedule.steps, schedule.scheme, seconds, parameters, pushes)
        for schedule in (slow, fast)
    )
    assert slow_rate <= fast_rate * (1 + 1e-9)
    assert level_of(slow) >= level_of(fast)
    if slow.scheme == fast.scheme:
        assert slow.steps >= fast.steps


@given(LINKS, SECONDS, PARAMETERS, PUSHES)
def test_fit_to_uplink_never_longer_or_smaller_than_the_link_demands(
    link, seconds, parameters, pushes
):
    schedule = fit_to_uplink(budget(link, pushes), seconds, parameters, MAX_STEPS)
    bytes_per_step = budget(link) * seconds * (1 - 1e-9)
    index = level_of(schedule)
    for denser in COMPRESSION_LADDER[:index]:
        size = pushes * (denser.scheme.payload_size(parameters) + TYPICAL_HEADER_BYTES)
        assert size > bytes_per_step * denser.max_steps
    if COMPRESSION_LADDER[index].min_steps < schedule.steps < MAX_STEPS:
        size = pushes * (schedule.scheme.payload_size(parameters) + TYPICAL_HEADER_BYTES)
        assert size > bytes_per_step * (schedule.steps - 1)


LEVELS_OF_EVERY_RUN = [level for level in COMPRESSION_LADDER if not level.min_rounds]


@pytest.mark.parametrize(("above", "below"), list(pairwise(LEVELS_OF_EVERY_RUN)))
def test_compression_ladder_has_no_gap_that_leaves_a_link_idle(above, below):
    densest_below = below.scheme.bits_per_parameter / below.min_steps
    assert densest_below >= above.scheme.bits_per_parameter / above.max_steps
    assert densest_below < above.scheme.bits_per_parameter / above.min_steps, (
        "each level costs fewer bytes than the one above"
    )


@given(LINKS, SECONDS, PARAMETERS, PUSHES, st.floats(0, 1e7))
def test_fit_to_uplink_sparse_long_rounds_only_where_a_run_has_many(
    link, seconds, parameters, pushes, run_steps
):
    schedule = fit_to_uplink(budget(link, pushes), seconds, parameters, MAX_STEPS, run_steps)
    if not schedule.scheme.dense and schedule.steps > 23:
        assert MIN_SPARSE_ROUNDS * schedule.steps <= run_steps
        assert schedule.carries_residual
    endless = fit_to_uplink(budget(link, pushes), seconds, parameters, MAX_STEPS)
    if run_steps >= 400 * endless.steps:
        assert schedule == endless


def test_fit_to_uplink_a_short_run_hears_of_its_peers_often():
    """GPT-2 124M, eight fast GPUs on home lines, 20 tokens a parameter: 4,740 steps of each."""
    allowed = budget(15e6 / 8, 7)
    schedule = fit_to_uplink(allowed, 1.0, 124_000_000, run_steps=4740)
    assert (str(schedule.scheme), schedule.carries_residual) == ("top64x2", True)
    assert 270 <= 4740 / schedule.steps <= 300, "of all values in two bits there would be 33"
    few = fit_to_uplink(allowed, 1.0, 124_000_000, run_steps=1000)
    assert few.scheme.dense, "one value in 64 would not be sent often enough"


@pytest.mark.parametrize("steps", [10, 100])
@pytest.mark.parametrize(
    ("codec", "rounds", "carries"),
    [
        ("top64x2", MIN_CARRY_ROUNDS, True),
        ("top64x2", MIN_CARRY_ROUNDS - 1, False),
        ("dense2", 1000, False),
    ],
)
def test_schedule_carries_the_residual_where_a_run_has_many_sparse_rounds(
    codec, rounds, carries, steps
):
    recipe = Recipe(codec=codec, round_steps=steps)
    schedule = choose_schedule(spec_of(recipe), 1e6, 1.0, run_steps=rounds * steps)
    assert schedule.carries_residual == carries
    aligned = align_with_peers(recipe, schedule, 1.0, 1.0, 1e9)
    assert aligned.carries_residual == schedule.carries_residual


@given(LINKS, SECONDS, PARAMETERS, PUSHES)
def test_first_rounds_have_no_momentum_where_the_ladder_makes_them_long(
    link, seconds, parameters, pushes
):
    schedule = fit_to_uplink(budget(link, pushes), seconds, parameters, MAX_STEPS)
    aligned = align_with_peers(Recipe(codec="auto"), schedule, seconds, seconds, 1e9)
    plain_rounds = 4 if schedule.steps >= 128 else 0
    for each in (schedule, aligned, aligned.with_streaming((parameters // 2,) * 2, 0.0, 1e9)):
        assert [each.has_momentum(n) for n in range(6)] == [n >= plain_rounds for n in range(6)]
    chosen = choose_schedule(spec_of(Recipe(codec="dense2", round_steps=500)), link, seconds)
    assert chosen.has_momentum(0), "the owner chose these rounds for the recipe's momentum"


@given(LINKS, SECONDS, MODELS)
def test_choose_schedule_fixed_codec_is_used_on_every_uplink(link, seconds, model):
    recipe = Recipe(codec="top64x2", round_steps=7)
    schedule = choose_schedule(spec_of(recipe, model), link, seconds)
    assert (schedule.steps, str(schedule.scheme)) == (7, "top64x2")


@given(LINKS, SECONDS, MODELS, st.floats(1, 1e7))
def test_choose_schedule_auto_codec_fits_the_uplink(link, seconds, model, run_steps):
    spec = spec_of(Recipe(codec="auto"), model)
    assert choose_schedule(spec, link, seconds, run_steps) == fit_to_uplink(
        link, seconds, spec.model.parameters, MAX_STEPS, run_steps
    )


def test_choose_schedule_unknown_uplink_uses_the_recipes_rounds():
    auto = Recipe(codec="auto", round_steps=7)
    schedule = choose_schedule(spec_of(auto), math.inf, 1.0)
    assert (schedule.steps, schedule.scheme) == (7, DEFAULT_SCHEME)
    assert choose_schedule(spec_of(auto, max_steps=3), math.inf, None).steps == 3, (
        "the round must not exceed the tokens that an update may contain"
    )


@given(LINKS, MODELS)
def test_choose_schedule_first_update_does_not_fill_a_known_uplink(link, model):
    """Before the first step nobody knows how long a round lasts."""
    spec = spec_of(Recipe(codec="auto", round_steps=7), model)
    schedule = choose_schedule(spec, link, None)
    assert schedule.steps == 7

    def seconds(scheme: QuantizationScheme) -> float:
        return scheme.payload_size(spec.model.parameters) / link

    denser = SCHEMES[: SCHEMES.index(schedule.scheme)]
    assert all(seconds(scheme) > FIRST_UPDATE_SECONDS for scheme in denser)
    if schedule.scheme != SPARSEST_SCHEME:
        assert seconds(schedule.scheme) <= FIRST_UPDATE_SECONDS * (1 + 1e-9)


def test_machine_without_a_share_or_a_line_has_a_schedule():
    for update_rate, run_steps in ((0.0, 0.0), (0.0, math.inf), (1e6, 0.0)):
        schedule = fit_to_uplink(update_rate, 1.0, 1_000_000, run_steps=run_steps)
        assert schedule.steps >= 1
        assert schedule.steps_until_sent(1.0, 1_000_000, update_rate) >= schedule.steps


@pytest.mark.parametrize("max_steps", [1, 5, LONG_ROUNDS.min_steps - 1])
def test_fit_to_uplink_dead_link_gets_smallest_and_longest(max_steps):
    schedule = fit_to_uplink(0.0, 1.0, 1_000_000, max_steps=max_steps)
    assert (schedule.steps, schedule.scheme) == (max_steps, SPARSEST_SCHEME)


def test_fit_to_uplink_dead_link_gets_the_longest_rounds():
    schedule = fit_to_uplink(0.0, 1.0, 1_000_000)
    assert (schedule.steps, schedule.scheme) == (MAX_STEPS, SPARSEST_SCHEME)
    few = fit_to_uplink(0.0, 1.0, 1_000_000, run_steps=50 * MAX_STEPS)
    assert (few.steps, few.scheme) == (MAX_STEPS, LONG_ROUNDS.scheme), (
        "one value in 64 is sent too seldom"
    )


def test_fit_to_uplink_home_line_and_lan_examples():
    """GPT-2 124M on a gaming GPU with a second a step: 100 Mb/s, 20 Mb/s, and a gigabit LAN."""
    lan, fast, slow = (
        fit_to_uplink(budget(megabits * 1e6 / 8, 3), 1.0, 124_000_000)
        for megabits in (1000, 100, 20)
    )
    assert str(lan.scheme) == "dense2" and lan.steps == 10
    assert fast.scheme.dense and fast.steps <= 40
    assert slow.steps * 0.8 * 20e6 / 8 >= 3 * slow.scheme.payload_size(124_000_000)
    assert math.isclose(lan.scheme.bits_per_parameter, 2, rel_tol=0.01)


@given(st.floats(100, 1e6), SECONDS, PUSHES)
def test_headers_of_a_rounds_parts_use_a_tenth_of_a_slow_uplink(link, seconds, pushes):
    alone = fit_to_uplink(budget(link, pushes), seconds, 200_000)
    round_seconds = alone.steps * seconds
    whole = RoundSchedule(
        alone.steps,
        alone.scheme,
        ends_at=round_seconds,
        period=round_seconds,
        min_part_seconds=alone.min_part_seconds,
    )
    streamed = whole.with_streaming((50_000,) * 4, 0.0, 0.0)
    headers = pushes * TYPICAL_HEADER_BYTES * streamed.updates_per_round
    assert streamed.updates_per_round == 1 or headers <= (
        HEADER_SHARE * budget(link) * round_seconds * (1 + 1e-9)
    )
