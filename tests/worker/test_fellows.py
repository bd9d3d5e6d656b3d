"""What a machine makes of the others: its share, the window it ends its round with, a guess of what is under way."""

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from barnraise.exchange.fellows import Fellows
from barnraise.exchange.form import Form
from barnraise.exchange.gossip import Linked
from barnraise.exchange.guess import LARGEST, MOST, Absent, momenta
from barnraise.exchange.rhythm import STRETCH, Rhythm, together
from barnraise.spec import Recipe, RunSpec, preset
from barnraise.wire import FragmentUpdate, Update

DENSE = Form.parse("dense4")
RECIPE = Recipe(codec="dense4", round_steps=10, strategy="windows")
SECONDS = st.floats(1e-3, 1e4)
RATES, TOKENS = st.floats(1.0, 1e6), st.integers(1, 1 << 30)
ME, BEN, CLEO = (f"{letter * 64}.{'0' * 16}" for letter in "abc")


def update(author: str, seq: int, tokens: int = 1000) -> Update:
    key, _, incarnation = author.partition(".")
    return Update(
        run="01890000-0000-7000-8000-000000000000", peer=key, incarnation=incarnation, seq=seq, previous="0" * 64,
        tokens=tokens, total=tokens * seq, fragments=[FragmentUpdate(digest="0" * 64, size=1, sketch="0" * 16)],
    )  # fmt: skip


class Circle:
    def __init__(self):
        self.links: dict[str, Linked] = {}

    def link(self, author: str, rate: float = 100.0, **vector: int) -> Linked:
        key = author.partition(".")[0]
        self.links[key] = Linked(key, since=0.0, heard=0.0, whole_at=0.0, rate=rate)
        return self.links[key]


def company(recipe: Recipe = RECIPE) -> tuple[Circle, Fellows]:
    """Ben's and Cleo's first three updates have come, one every ten seconds, at 100 tokens/s each."""
    circle = Circle()
    fellows = Fellows(RunSpec(preset("gpt2-124m"), recipe=recipe), circle)
    fellows.begin({ME: 3})
    fellows.said(1000, 0.0)
    for author in (BEN, CLEO):
        circle.link(author).vector = {ME: 3, BEN: 3, CLEO: 3}
        for seq in (1, 2, 3):
            fellows.arrived(update(author, seq), 10.0 * seq)
    return circle, fellows


# ---- windows


@given(SECONDS, SECONDS, st.floats(0, 2e9), st.integers(1, 1000))
def test_a_window_ends_within_itself_and_at_the_same_moment_for_all_who_see_one_average_machine(mine, mean, now, steps):
    recipe = replace(RECIPE, round_steps=steps)
    alone = Rhythm(steps, DENSE)
    found, other = (together(recipe, alone, seconds, mean, now) for seconds in (mine, 1.0))
    period = 2.0 ** round(math.log2(steps * mean))
    assert found.ends == other.ends and found.form == DENSE
    assert now < found.ends <= now + period * (1 + 1e-9) + 1e-6
    assert period / math.sqrt(2) * (1 - 1e-9) <= steps * mean <= period * math.sqrt(2) * (1 + 1e-9)
    assert found.steps == max(1, min(6666, round(period / mine)))


@given(SECONDS, st.floats(0, 1e6), st.integers(1, 1000), st.integers(1, 1000))
def test_rounds_that_lines_choose_end_together_every_second_time_or_fourth(seconds, now, fast, slow):
    """And none is shorter than its line demands."""
    recipe = replace(RECIPE, codec="auto")
    ends = sorted(together(recipe, Rhythm(steps, DENSE), seconds, 1.0, now).ends for steps in (fast, slow))
    periods = sorted(2.0 ** math.ceil(math.log2(steps * seconds)) for steps in (fast, slow))
    assert all(
        period >= steps * seconds * (1 - 1e-12) for period, steps in zip(periods, sorted((fast, slow)), strict=True)
    )
    assert (ends[1] / periods[0]).is_integer(), "the longer window ends where one of the shorter does"


def test_a_round_has_a_step_at_least_and_no_clock_can_make_it_endless():
    window = together(RECIPE, Rhythm(10, DENSE), 0.4, 0.4, 1e9)
    assert not window.over(0, math.inf) and window.over(1, window.ends) and not window.over(1, window.ends - 0.1)
    assert window.steps == 10 and window.over(int(STRETCH * 10), 0.0), "the clock went back by years"
    assert together(RECIPE, Rhythm(10, DENSE), 0.4, 0.4, 1e9, most=1).over(1, 0.0), "no update may state more tokens"


def test_who_is_alone_or_does_as_it_likes_has_rounds_of_the_recipes_steps():
    circle, fellows = company()
    assert math.isfinite(fellows.rhythm(100.0, math.inf, 31.0, 1e9).ends)
    circle.links.clear()
    assert fellows.rhythm(100.0, math.inf, 500.0, 1e9) == Rhythm(10, DENSE)
    _, apart = company(replace(RECIPE, strategy="async"))
    assert apart.rhythm(100.0, math.inf, 31.0, 1e9) == Rhythm(10, DENSE)
    _, fellows = company()
    assert fellows.rhythm(0.0, math.inf, 31.0, 1e9) == Rhythm(10, DENSE), "before the first step was timed"


# ---- guesses


@given(st.lists(st.builds(Absent, st.integers(1, 1 << 40), TOKENS, RATES), max_size=30), TOKENS, RATES)
def test_a_guess_is_bounded_whatever_is_announced(absent, tokens, rate):
    found = momenta(RECIPE, absent, tokens, rate)
    assert 0 <= found <= len(absent) * MOST * LARGEST * RECIPE.outer_rate
    assert momenta(replace(RECIPE, speculation=0.5), absent, tokens, rate) == pytest.approx(found / 2)


def test_a_guess_is_what_a_machine_like_us_says_by_weight_and_by_tokens():
    like_us = Absent(count=1, tokens=1000, rate=50.0)
    assert momenta(RECIPE, [like_us], 1000, 50.0) == RECIPE.outer_rate
    assert momenta(RECIPE, [like_us] * 3, 1000, 50.0) == pytest.approx(3 * RECIPE.outer_rate)
    assert momenta(RECIPE, [replace(like_us, count=2)], 1000, 50.0) == 2 * RECIPE.outer_rate
    assert momenta(RECIPE, [Absent(1, 2000, 100.0)], 1000, 50.0) == 4 * RECIPE.outer_rate, (
        "twice as fast, in one window"
    )
    assert momenta(RECIPE, [like_us], 0, 50.0) == momenta(RECIPE, [like_us], 1000, 0.0) == 0.0


def test_what_was_announced_and_has_not_come_is_guessed_until_it_comes():
    circle, fellows = company()
    assert fellows.guess(ME, 100.0, 31.0) == 0.0
    circle.links["c" * 64].vector[BEN] = 4
    assert fellows.guess(ME, 100.0, 31.0) == pytest.approx(RECIPE.outer_rate)
    circle.links["b" * 64].rate = 700.0
    assert fellows.guess(ME, 100.0, 31.5) == pytest.approx(RECIPE.outer_rate), "nothing else is missing"
    circle.links["c" * 64].vector |= {CLEO: 4, ME: 9, "d" * 64 + ".0": 50}
    circle.links["b" * 64].rate = 100.0
    assert fellows.guess(ME, 100.0, 32.0) == pytest.approx(2 * RECIPE.outer_rate), "of a stranger nothing is known"
    fellows.arrived(update(BEN, 4), 33.0)
    fellows.arrived(update(CLEO, 4), 33.0)
    assert fellows.guess(ME, 100.0, 33.0) == 0.0


def test_what_was_announced_and_never_comes_is_not_waited_for():
    circle, fellows = company()
    circle.links["c" * 64].vector[BEN] = 4
    assert fellows.guess(ME, 100.0, 69.0) > 0
    assert fellows.guess(ME, 100.0, 71.0) == 0.0, "four of its rounds later"


def test_without_speculation_nothing_is_guessed():
    circle, fellows = company(replace(RECIPE, speculation=0.0))
    circle.links["c" * 64].vector[BEN] = 4
    assert fellows.guess(ME, 100.0, 31.0) == 0.0


def test_streams_are_windows_said_in_turns_and_nothing_is_guessed_in_them():
    circle, fellows = company(replace(RECIPE, strategy="streams", round_steps=30))
    circle.links["c" * 64].vector[BEN] = 4
    clock = 1e9 + 0.5
    window = company(replace(RECIPE, round_steps=30))[1].rhythm(500.0, math.inf, 31.0, clock)
    whole = fellows.rhythm(500.0, math.inf, 31.0, clock, turns=False)
    assert whole == window and fellows.guess(ME, 500.0, 31.0) > 0
    turn = fellows.rhythm(500.0, math.inf, 31.0, clock)
    assert (turn.steps, turn.period) == (window.steps, window.period) and clock < turn.ends <= window.ends
    assert len(turn.turns.ends) > 1 and fellows.guess(ME, 500.0, 31.0) == 0.0
    fellows.said(1000, turn.ends)
    following = fellows.rhythm(500.0, math.inf, 31.0, turn.ends)
    assert set(turn.due(turn.ends)) == set(range(14)), "all that was never said"
    assert following.ends > turn.ends and set(following.due(following.ends)) in map(set, following.turns.parts)
