"""Rounds as short and updates as dense as a link carries."""

import math
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from barnraise.exchange.pacing.round_schedule import FIRST, LADDER, SHARE, agreed, rhythm
from barnraise.spec import Recipe

LINKS = st.floats(1e3, 1e10)  # bytes a second
SECONDS = st.floats(0.01, 600)
PARAMETERS = st.integers(10_000, 200_000_000_000)
PUSHES = st.integers(1, 8)
MOST = 10_000


def budget(link: float) -> float:
    return SHARE * link


def needed(steps: int, form, step_seconds: float, parameters: int, pushes: int) -> float:
    """Bytes a second of updates that each leave within their round."""
    return pushes * form.size(parameters) / (steps * step_seconds)


def thinnest(step_seconds: float, parameters: int, pushes: int) -> float:
    return needed(MOST, LADDER[-1].form, step_seconds, parameters, pushes)


@given(LINKS, SECONDS, PARAMETERS, PUSHES)
def test_an_update_leaves_within_its_round_at_the_stated_share(link, seconds, parameters, pushes):
    found = rhythm(budget(link), seconds, parameters, pushes, MOST)
    taken = needed(found.steps, found.form, seconds, parameters, pushes)
    assert taken <= SHARE * link * (1 + 1e-9) or (found.steps, found.form) == (
        MOST,
        LADDER[-1].form,
    )
    if SHARE * link >= thinnest(seconds, parameters, pushes):
        assert taken <= SHARE * link * (1 + 1e-9)


@given(LINKS, LINKS, SECONDS, PARAMETERS, PUSHES)
def test_a_faster_link_says_no_less(one, other, seconds, parameters, pushes):
    slow, fast = (
        rhythm(budget(link), seconds, parameters, pushes) for link in sorted((one, other))
    )
    assert slow.form.bits_a_parameter <= fast.form.bits_a_parameter
    taken = [needed(found.steps, found.form, seconds, parameters, pushes) for found in (slow, fast)]
    assert taken[0] <= taken[1] * (1 + 1e-9)
    if slow.form == fast.form:
        assert slow.steps >= fast.steps


@given(LINKS, SECONDS, PARAMETERS, PUSHES)
def test_a_round_is_never_longer_and_never_thinner_than_the_link_demands(
    link, seconds, parameters, pushes
):
    found, carried = rhythm(budget(link), seconds, parameters, pushes, MOST), budget(link) * seconds
    at = next(i for i, rung in enumerate(LADDER) if rung.form == found.form)
    for denser in LADDER[:at]:
        assert pushes * denser.form.size(parameters) > carried * denser.longest * (1 - 1e-9)
    if LADDER[at].shortest < found.steps < MOST:
        assert pushes * found.form.size(parameters) > carried * (found.steps - 1) * (1 - 1e-9)


@pytest.mark.parametrize(("above", "below"), list(pairwise(LADDER)))
def test_the_ladder_has_no_gap_in_which_a_link_would_be_left_idle(above, below):
    assert (
        below.form.bits_a_parameter / below.shortest >= above.form.bits_a_parameter / above.longest
    )
    assert below.form.bits_a_parameter < above.form.bits_a_parameter
    assert below.longest >= above.longest


@given(LINKS, SECONDS, PARAMETERS, PUSHES)
def test_a_recipe_that_names_its_codec_is_kept_to_on_every_line(link, seconds, parameters, pushes):
    found = agreed(Recipe(codec="top64x2", round_steps=7), parameters, link, seconds, pushes, MOST)
    assert (found.steps, str(found.form)) == (7, "top64x2")


@given(LINKS, SECONDS, PARAMETERS, PUSHES)
def test_a_recipe_that_leaves_it_open_gets_what_the_line_carries(link, seconds, parameters, pushes):
    auto = Recipe(codec="auto")
    assert agreed(auto, parameters, link, seconds, pushes, MOST) == rhythm(
        budget(link), seconds, parameters, pushes, MOST
    )


def test_on_a_line_that_is_not_known_yet_rounds_are_the_recipes_own():
    auto = Recipe(codec="auto", round_steps=7)
    assert (
        agreed(auto, 1000, math.inf, 1.0, 1, MOST).steps
        == agreed(auto, 1000, 1e6, None, 1, MOST).steps
        == 7
    )
    assert agreed(auto, 1000, math.inf, 1.0, 1, MOST).form == FIRST
    assert agreed(auto, 1000, math.inf, None, 1, 3).steps == 3, "no more than an update may state"


def test_a_link_that_carries_nothing_is_given_the_thinnest_and_the_longest():
    found = rhythm(0.0, 1.0, 1_000_000, most=500)
    assert (found.steps, found.form) == (500, LADDER[-1].form)


def test_an_update_never_states_more_steps_than_it_may():
    assert rhythm(1e12, 1.0, 1_000_000, most=2).steps == 2


def test_a_home_line_and_a_lan_as_examples():
    """GPT-2 124M on a gaming GPU with a second a step: 100 Mb/s, 20 Mb/s, and a gigabit LAN."""
    lan, fast, slow = (
        rhythm(budget(megabits * 1e6 / 8), 1.0, 124_000_000, pushes=3)
        for megabits in (1000, 100, 20)
    )
    assert str(lan.form) == "dense2" and lan.steps == 10
    assert fast.form.dense and fast.steps <= 40
    assert slow.steps * 0.8 * 20e6 / 8 >= 3 * slow.form.size(124_000_000)
    assert math.isclose(lan.form.bits_a_parameter, 2, rel_tol=0.01)
