"""Tests of peer estimates: training share, aligned rounds, predicted updates in flight."""

import math
from collections.abc import Collection
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from barnraise.exchange.compression.scheme import QuantizationScheme
from barnraise.exchange.gossip.gossip import LinkState
from barnraise.exchange.ledger.validation import EMPTY_PART
from barnraise.exchange.pacing.delay_compensation import (
    MAX_IN_FLIGHT,
    MAX_RELATIVE_SIZE,
    InFlightUpdate,
    estimate_relative_sizes,
    predict_in_flight,
)
from barnraise.exchange.pacing.peer_estimates import PeerEstimates
from barnraise.exchange.pacing.round_schedule import MAX_STRETCH, RoundSchedule, align_with_peers
from barnraise.protocol.messages import FragmentUpdate, Update
from barnraise.spec import Recipe, RunSpec, preset

DENSE = QuantizationScheme.parse("dense4")
RECIPE = Recipe(codec="dense4", round_steps=10, strategy="windows")
SECONDS = st.floats(1e-3, 1e4)
RATES, TOKENS = st.floats(1.0, 1e6), st.integers(1, 1 << 30)
MODEL = preset("gpt2-124m")
FRAGMENTS = len(MODEL.fragments())
ME, BEN, CLEO = (f"{letter * 64}.{'0' * 16}" for letter in "abc")


def update(
    author: str, seq: int, tokens: int = 1000, said: Collection[int] = range(FRAGMENTS)
) -> Update:
    key, _, incarnation = author.partition(".")
    part = FragmentUpdate(digest="0" * 64, size=1, sketch="0" * 16)
    return Update(
        run="01890000-0000-7000-8000-000000000000",
        peer=key,
        incarnation=incarnation,
        seq=seq,
        previous="0" * 64,
        tokens=tokens,
        total=tokens * seq,
        fragments=[part if i in said else EMPTY_PART for i in range(FRAGMENTS)],
    )


class Circle:
    def __init__(self):
        self.links: dict[str, LinkState] = {}

    def link(self, author: str, rate: float = 100.0, **vector: int) -> LinkState:
        key = author.partition(".")[0]
        self.links[key] = LinkState(
            key, connected_at=0.0, last_received_at=0.0, next_full_state_at=0.0, rate=rate
        )
        return self.links[key]


def company(recipe: Recipe = RECIPE) -> tuple[Circle, PeerEstimates]:
    """Let three updates of Ben and of Cleo arrive, every ten seconds at 100 tokens/s each."""
    circle = Circle()
    fellows = PeerEstimates(RunSpec(MODEL, recipe=recipe), circle)
    fellows.on_update_published(update(ME, 3), 0.0)
    for author in (BEN, CLEO):
        circle.link(author).vector = {ME: 3, BEN: 3, CLEO: 3}
        for seq in (1, 2, 3):
            fellows.on_update_received(update(author, seq), 10.0 * seq)
    return circle, fellows


# ---- windows


@given(SECONDS, SECONDS, st.floats(0, 2e9), st.integers(1, 1000))
def test_aligned_round_ends_at_same_time_for_equal_average_machine(mine, mean, now, steps):
    recipe = replace(RECIPE, round_steps=steps)
    alone = RoundSchedule(steps, DENSE)
    found, other = (align_with_peers(recipe, alone, seconds, mean, now) for seconds in (mine, 1.0))
    period = 2.0 ** round(math.log2(steps * mean))
    assert found.ends_at == other.ends_at and found.scheme == DENSE
    assert now < found.ends_at <= now + period * (1 + 1e-9) + 1e-6
    assert period / math.sqrt(2) * (1 - 1e-9) <= steps * mean <= period * math.sqrt(2) * (1 + 1e-9)
    assert found.steps == max(1, min(6666, round(period / mine)))


@given(SECONDS, st.floats(0, 1e6), st.integers(1, 1000), st.integers(1, 1000))
def test_auto_rounds_of_different_uplinks_end_together(seconds, now, fast, slow):
    """And none is shorter than its line demands."""
    recipe = replace(RECIPE, codec="auto")
    ends = sorted(
        align_with_peers(recipe, RoundSchedule(steps, DENSE), seconds, 1.0, now).ends_at
        for steps in (fast, slow)
    )
    periods = sorted(2.0 ** math.ceil(math.log2(steps * seconds)) for steps in (fast, slow))
    assert all(
        period >= steps * seconds * (1 - 1e-12)
        for period, steps in zip(periods, sorted((fast, slow)), strict=True)
    )
    assert (ends[1] / periods[0]).is_integer(), (
        "the longer window ends where one of the shorter does"
    )


def test_round_has_at_least_one_step_and_no_clock_makes_it_endless():
    window = align_with_peers(RECIPE, RoundSchedule(10, DENSE), 0.4, 0.4, 1e9)
    assert (
        not window.is_over(0, math.inf)
        and window.is_over(1, window.ends_at)
        and not window.is_over(1, window.ends_at - 0.1)
    )
    assert window.steps == 10 and window.is_over(int(MAX_STRETCH * 10), 0.0), (
        "the clock went back by years"
    )
    assert align_with_peers(RECIPE, RoundSchedule(10, DENSE), 0.4, 0.4, 1e9, max_steps=1).is_over(
        1, 0.0
    ), "no update may state more tokens"


def test_round_alone_or_async_has_the_recipes_steps():
    circle, fellows = company()
    assert math.isfinite(fellows.plan_round(100.0, math.inf, 31.0, 1e9).ends_at)
    circle.links.clear()
    assert fellows.plan_round(100.0, math.inf, 500.0, 1e9) == RoundSchedule(10, DENSE)
    _, apart = company(replace(RECIPE, strategy="async"))
    assert apart.plan_round(100.0, math.inf, 31.0, 1e9) == RoundSchedule(10, DENSE)
    _, fellows = company()
    assert fellows.plan_round(0.0, math.inf, 31.0, 1e9) == RoundSchedule(10, DENSE), (
        "before the first step was timed"
    )


# ---- guesses

ONE = RECIPE.outer_rate  # of its momenta an update of a machine like us


@given(
    st.lists(
        st.tuples(
            st.sampled_from("bcd"), st.lists(st.booleans(), min_size=3, max_size=3), TOKENS, RATES
        ),
        max_size=30,
    ),
    st.lists(st.integers(0, 1 << 30), min_size=3, max_size=3),
    RATES,
)
def test_predict_in_flight_is_bounded_and_covers_only_sent_fragments(updates, own_tokens, rate):
    absent = [
        InFlightUpdate(who, True, estimate_relative_sizes(said, tokens, theirs, own_tokens, rate))
        for who, said, tokens, theirs in updates
    ]
    found = predict_in_flight(RECIPE, absent, 3)
    for i, guessed in enumerate(found):
        authors = [who for who, said, _, _ in updates if said[i]]
        counted = sum(min(MAX_IN_FLIGHT, authors.count(who)) for who in set(authors))
        assert 0 <= guessed <= counted * MAX_RELATIVE_SIZE * ONE * (1 + 1e-9)
        assert (guessed > 0) == bool(counted and own_tokens[i])
    half = predict_in_flight(replace(RECIPE, speculation=0.5), absent, 3)
    in_turns = predict_in_flight(RECIPE, [replace(each, is_complete=False) for each in absent], 3)
    assert half == in_turns == pytest.approx([each / 2 for each in found])


def test_relative_size_grows_with_rate_and_tokens_of_each_fragment():
    assert estimate_relative_sizes([True, True], 1000, 50.0, [1000, 500], 50.0) == (1.0, 2.0)
    assert estimate_relative_sizes([True, False], 2000, 100.0, [1000, 1000], 50.0) == (4.0, 0.0), (
        "twice as fast, in one window"
    )
    assert estimate_relative_sizes([True, True], 1000, 50.0, [0, 1000], 50.0) == (0.0, 1.0), (
        "nothing of our own to guess by"
    )
    assert estimate_relative_sizes([True, True], 1000, 50.0, [1000, 1000], 0.0) == (0.0, 0.0)


def test_predict_in_flight_counts_update_until_it_arrives():
    circle, fellows = company()
    assert fellows.predict_in_flight([], 100.0, 31.0) == (0.0,) * FRAGMENTS
    assert fellows.predict_in_flight([update(BEN, 4)], 100.0, 31.0) == pytest.approx(
        (ONE,) * FRAGMENTS
    )
    circle.links["b" * 64].rate = 700.0
    assert fellows.predict_in_flight([update(BEN, 4)], 100.0, 31.5) == pytest.approx(
        (ONE,) * FRAGMENTS
    ), "it counts as it did"
    more = [update(CLEO, 4), update(BEN, 4), update(f"{'d' * 64}.{'0' * 16}", 50)]
    assert fellows.predict_in_flight(more, 100.0, 32.0) == pytest.approx((2 * ONE,) * FRAGMENTS), (
        "of a stranger nothing is known"
    )
    fellows.on_update_received(update(BEN, 4), 33.0)
    fellows.on_update_received(update(CLEO, 4), 33.0)
    assert fellows.predict_in_flight([], 100.0, 33.0) == (0.0,) * FRAGMENTS


def test_predict_in_flight_streamed_update_predicts_only_its_fragments():
    _, fellows = company()
    fellows.on_update_published(update(ME, 4, 500, said=[2]), 40.0)
    found = fellows.predict_in_flight(
        [update(BEN, 4, said=[0]), update(CLEO, 4, said=[2, 3])], 100.0, 31.0
    )
    assert found[:5] == pytest.approx((ONE / 2, 0.0, ONE, ONE / 2, 0.0)), (
        "ours of the third was half as large"
    )
    assert not any(found[5:])


def test_predict_in_flight_counts_first_few_updates_of_an_author():
    _, fellows = company()
    many = [update(BEN, seq, said=[0] if seq % 2 else [0, 1]) for seq in reversed(range(4, 12))]
    assert fellows.predict_in_flight(many, 100.0, 31.0)[:3] == pytest.approx(
        (MAX_IN_FLIGHT * ONE / 2, MAX_IN_FLIGHT * ONE / 2, 0.0)
    )


def test_predict_in_flight_ignores_overdue_peers():
    _, fellows = company()
    assert all(fellows.predict_in_flight([update(BEN, 4)], 100.0, 69.0))
    assert not any(fellows.predict_in_flight([update(BEN, 4)], 100.0, 71.0)), (
        "four of its rounds later"
    )


def test_predict_in_flight_without_speculation_is_zero():
    _, fellows = company(replace(RECIPE, speculation=0.0))
    assert not any(fellows.predict_in_flight([update(BEN, 4)], 100.0, 31.0))


def test_plan_round_streams_strategy_splits_the_aligned_round():
    _, fellows = company(replace(RECIPE, strategy="streams", round_steps=30))
    clock = 1e9 + 0.5
    window = company(replace(RECIPE, round_steps=30))[1].plan_round(500.0, math.inf, 31.0, clock)
    assert fellows.plan_round(500.0, math.inf, 31.0, clock, allow_streaming=False) == window
    turn = fellows.plan_round(500.0, math.inf, 31.0, clock)
    assert (turn.steps, turn.period) == (
        window.steps,
        window.period,
    ) and clock < turn.ends_at <= window.ends_at
    assert len(turn.streaming.ends) > 1
    fellows.on_update_published(update(ME, 4), turn.ends_at)
    following = fellows.plan_round(500.0, math.inf, 31.0, turn.ends_at)
    assert set(turn.fragments_due(turn.ends_at)) == set(range(14)), "all that was never said"
    assert following.ends_at > turn.ends_at and set(
        following.fragments_due(following.ends_at)
    ) in map(set, following.streaming.parts)
