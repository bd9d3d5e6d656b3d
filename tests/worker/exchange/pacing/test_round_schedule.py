"""Tests of the round schedule: rounds as short and updates as dense as a link carries."""

import math
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from barnraise.exchange.pacing.round_schedule import (
    COMPRESSION_LADDER,
    DEFAULT_SCHEME,
    UPLINK_SHARE,
    choose_schedule,
    fit_to_uplink,
)
from barnraise.spec import Recipe

LINKS = st.floats(1e3, 1e10)  # bytes a second
SECONDS = st.floats(0.01, 600)
PARAMETERS = st.integers(10_000, 200_000_000_000)
PUSHES = st.integers(1, 8)
MOST = 10_000


def budget(link: float) -> float:
    return UPLINK_SHARE * link


def needed(steps: int, form, step_seconds: float, parameters: int, pushes: int) -> float:
    """Bytes a second of updates that each leave within their round."""
    return pushes * form.payload_size(parameters) / (steps * step_seconds)


def thinnest(step_seconds: float, parameters: int, pushes: int) -> float:
    return needed(MOST, COMPRESSION_LADDER[-1].scheme, step_seconds, parameters, pushes)


@given(LINKS, SECONDS, PARAMETERS, PUSHES)
def test_fit_to_uplink_update_is_sent_within_its_round(link, seconds, parameters, pushes):
    found = fit_to_uplink(budget(link), seconds, parameters, pushes, MOST)
    taken = needed(found.steps, found.scheme, seconds, parameters, pushes)
    assert taken <= UPLINK_SHARE * link * (1 + 1e-9) or (found.steps, found.scheme) == (
        MOST,
        COMPRESSION_LADDER[-1].scheme,
    )
    if UPLINK_SHARE * link >= thinnest(seconds, parameters, pushes):
        assert taken <= UPLINK_SHARE * link * (1 + 1e-9)


@given(LINKS, LINKS, SECONDS, PARAMETERS, PUSHES)
def test_fit_to_uplink_faster_link_sends_no_less(one, other, seconds, parameters, pushes):
    slow, fast = (
        fit_to_uplink(budget(link), seconds, parameters, pushes) for link in sorted((one, other))
    )
    assert slow.scheme.bits_per_parameter <= fast.scheme.bits_per_parameter
    taken = [
        needed(found.steps, found.scheme, seconds, parameters, pushes) for found in (slow, fast)
    ]
    assert taken[0] <= taken[1] * (1 + 1e-9)
    if slow.scheme == fast.scheme:
        assert slow.steps >= fast.steps


@given(LINKS, SECONDS, PARAMETERS, PUSHES)
def test_fit_to_uplink_never_longer_or_smaller_than_the_link_demands(
    link, seconds, parameters, pushes
):
    found, carried = (
        fit_to_uplink(budget(link), seconds, parameters, pushes, MOST),
        budget(link) * seconds,
    )
    at = next(i for i, rung in enumerate(COMPRESSION_LADDER) if rung.scheme == found.scheme)
    for denser in COMPRESSION_LADDER[:at]:
        assert pushes * denser.scheme.payload_size(parameters) > carried * denser.max_steps * (
            1 - 1e-9
        )
    if COMPRESSION_LADDER[at].min_steps < found.steps < MOST:
        assert pushes * found.scheme.payload_size(parameters) > carried * (found.steps - 1) * (
            1 - 1e-9
        )


@pytest.mark.parametrize(("above", "below"), list(pairwise(COMPRESSION_LADDER)))
def test_compression_ladder_has_no_gap_that_leaves_a_link_idle(above, below):
    assert (
        below.scheme.bits_per_parameter / below.min_steps
        >= above.scheme.bits_per_parameter / above.max_steps
    )
    assert below.scheme.bits_per_parameter < above.scheme.bits_per_parameter
    assert below.max_steps >= above.max_steps


@given(LINKS, SECONDS, PARAMETERS, PUSHES)
def test_choose_schedule_fixed_codec_is_used_on_every_uplink(link, seconds, parameters, pushes):
    found = choose_schedule(
        Recipe(codec="top64x2", round_steps=7), parameters, link, seconds, pushes, MOST
    )
    assert (found.steps, str(found.scheme)) == (7, "top64x2")


@given(LINKS, SECONDS, PARAMETERS, PUSHES)
def test_choose_schedule_auto_codec_fits_the_uplink(link, seconds, parameters, pushes):
    auto = Recipe(codec="auto")
    assert choose_schedule(auto, parameters, link, seconds, pushes, MOST) == fit_to_uplink(
        budget(link), seconds, parameters, pushes, MOST
    )


def test_choose_schedule_unknown_uplink_uses_the_recipes_rounds():
    auto = Recipe(codec="auto", round_steps=7)
    assert (
        choose_schedule(auto, 1000, math.inf, 1.0, 1, MOST).steps
        == choose_schedule(auto, 1000, 1e6, None, 1, MOST).steps
        == 7
    )
    assert choose_schedule(auto, 1000, math.inf, 1.0, 1, MOST).scheme == DEFAULT_SCHEME
    assert choose_schedule(auto, 1000, math.inf, None, 1, 3).steps == 3, (
        "no more than an update may state"
    )


def test_fit_to_uplink_dead_link_gets_smallest_and_longest():
    found = fit_to_uplink(0.0, 1.0, 1_000_000, max_steps=500)
    assert (found.steps, found.scheme) == (500, COMPRESSION_LADDER[-1].scheme)


def test_fit_to_uplink_never_exceeds_max_steps():
    assert fit_to_uplink(1e12, 1.0, 1_000_000, max_steps=2).steps == 2


def test_fit_to_uplink_home_line_and_lan_examples():
    """GPT-2 124M on a gaming GPU with a second a step: 100 Mb/s, 20 Mb/s, and a gigabit LAN."""
    lan, fast, slow = (
        fit_to_uplink(budget(megabits * 1e6 / 8), 1.0, 124_000_000, pushes=3)
        for megabits in (1000, 100, 20)
    )
    assert str(lan.scheme) == "dense2" and lan.steps == 10
    assert fast.scheme.dense and fast.steps <= 40
    assert slow.steps * 0.8 * 20e6 / 8 >= 3 * slow.scheme.payload_size(124_000_000)
    assert math.isclose(lan.scheme.bits_per_parameter, 2, rel_tol=0.01)
