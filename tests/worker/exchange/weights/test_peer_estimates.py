"""Tests of peer estimates: training share, aligned rounds, predicted updates in flight."""

import math
from collections.abc import Collection
from dataclasses import replace

import pytest
from helpers.updates.headers import PART, build_update
from hypothesis import given
from hypothesis import strategies as st

from barnraise.exchange.gossip.link_state import LinkState
from barnraise.exchange.weights.contribution import ContributionMeter
from barnraise.exchange.weights.delay_compensation import (
    MAX_IN_FLIGHT,
    MAX_RELATIVE_SIZE,
    InFlightUpdate,
    estimate_relative_sizes,
    predict_in_flight,
)
from barnraise.exchange.weights.peer_estimates import MAX_DRIFT, PeerEstimates, SteadyValue
from barnraise.exchange.weights.weighting import GRACE_SECONDS
from barnraise.ledger.validation import EMPTY_PART
from barnraise.planning.quantization_scheme import QuantizationScheme
from barnraise.planning.round_limits import MAX_STRETCH
from barnraise.planning.round_schedule import RoundSchedule, align_with_peers
from barnraise.planning.uplink_budget import UplinkUse
from barnraise.protocol.messages import Update
from barnraise.spec import Recipe, RunSpec, preset

DENSE = QuantizationScheme.parse("dense4")
RECIPE = Recipe(codec="dense4", round_steps=10, strategy="windows")
UNKNOWN = UplinkUse(math.inf)
SECONDS = st.floats(1e-3, 1e4)
RATES, TOKENS = st.floats(1.0, 1e6), st.integers(1, 1 << 30)
MODEL = preset("gpt2-124m")
FRAGMENTS = len(MODEL.fragments())
ME, BEN, CLEO = (f"{letter * 64}.{'0' * 16}" for letter in "abc")


def update(
    author: str, seq: int, tokens: int = 1000, published: Collection[int] = range(FRAGMENTS)
) -> Update:
    key, _, incarnation = author.partition(".")
    parts = [PART if i in published else EMPTY_PART for i in range(FRAGMENTS)]
    return build_update(
        key, seq, volunteer=key, incarnation=incarnation, tokens=tokens, fragments=parts
    )


class FakeGossip:
    """The links that estimates read of the gossip."""

    def __init__(self):
        self.links: dict[str, LinkState] = {}
        self.ended: dict[str, None] = {}

    def link(
        self, author: str, rate: float = 100.0, volunteer: str = "", connected_at: float = 0.0
    ) -> LinkState:
        key = author.partition(".")[0]
        self.links[key] = LinkState(
            key,
            connected_at=connected_at,
            last_received_at=0.0,
            next_full_state_at=0.0,
            volunteer=volunteer or key,
            rate=rate,
        )
        return self.links[key]


def two_peers(recipe: Recipe = RECIPE) -> tuple[FakeGossip, PeerEstimates]:
    """Let three updates of Ben and of Cleo arrive, every ten seconds at 100 tokens/s each."""
    gossip = FakeGossip()
    sizes = [fragment.size for fragment in MODEL.fragments()]
    contribution = ContributionMeter(sizes, seed=1)
    estimates = PeerEstimates(RunSpec(MODEL, recipe=recipe), gossip, contribution)
    estimates.on_update_published(update(ME, 3), 0.0)
    for author in (BEN, CLEO):
        gossip.link(author).vector = {ME: 3, BEN: 3, CLEO: 3}
        for seq in (1, 2, 3):
            estimates.on_update_received(update(author, seq), 10.0 * seq)
    return gossip, estimates


# ---- windows


@given(SECONDS, SECONDS, st.floats(0, 2e9), st.integers(1, 1000))
def test_aligned_rounds_of_machines_with_one_average_end_together(own, mean, now, steps):
    recipe = replace(RECIPE, round_steps=steps)
    alone = RoundSchedule(steps, DENSE)
    aligned, other = (align_with_peers(recipe, alone, seconds, mean, now) for seconds in (own, 1.0))
    period = 2.0 ** round(math.log2(steps * mean))
    assert aligned.ends_at == other.ends_at and aligned.scheme == DENSE
    assert now < aligned.ends_at <= now + period * (1 + 1e-9) + 1e-6
    assert period / math.sqrt(2) * (1 - 1e-9) <= steps * mean <= period * math.sqrt(2) * (1 + 1e-9)
    assert aligned.steps == max(1, min(6666, round(period / own)))


@given(SECONDS, st.floats(0, 1e6), st.integers(1, 1000), st.integers(1, 1000))
def test_auto_rounds_of_different_uplinks_end_together(seconds, now, fast, slow):
    """No round is shorter than its uplink requires."""
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
        "each longer window ends together with a shorter one"
    )


def test_round_has_at_least_one_step_and_no_clock_makes_it_endless():
    window = align_with_peers(RECIPE, RoundSchedule(10, DENSE), 0.4, 0.4, 1e9)
    assert not window.is_over(0, math.inf)
    assert window.is_over(1, window.ends_at)
    assert not window.is_over(1, window.ends_at - 0.1)
    assert window.steps == 10 and window.is_over(int(MAX_STRETCH * 10), 0.0), (
        "a round ends even if the clock is set back by years"
    )
    short = align_with_peers(RECIPE, RoundSchedule(10, DENSE), 0.4, 0.4, 1e9, max_steps=1)
    assert short.is_over(1, 0.0), "no update may state more tokens"


def test_round_alone_or_async_has_the_recipes_steps():
    gossip, estimates = two_peers()
    assert math.isfinite(estimates.plan_round(100.0, UNKNOWN, 31.0, 1e9).ends_at)
    gossip.links.clear()
    assert estimates.plan_round(100.0, UNKNOWN, 500.0, 1e9) == RoundSchedule(10, DENSE)
    _, asynchronous = two_peers(replace(RECIPE, strategy="async"))
    assert asynchronous.plan_round(100.0, UNKNOWN, 31.0, 1e9) == RoundSchedule(10, DENSE)
    _, estimates = two_peers()
    assert estimates.plan_round(0.0, UNKNOWN, 31.0, 1e9) == RoundSchedule(10, DENSE), (
        "the first step has not been measured yet"
    )


# ---- announced rates


def test_inflated_rate_leaves_this_machine_its_share():
    gossip, estimates = two_peers()
    gossip.link(f"{'d' * 64}.{'0' * 16}", rate=9e14)
    assert estimates.training_share(100.0, 31.0) == pytest.approx(0.25), "no round has arrived"
    assert estimates.training_share(100.0, 31.0 + 1e6) == 1.0, "all others are overdue"
    gossip.links["b" * 64].rate = 9e14
    assert estimates.training_share(100.0, 31.0) == pytest.approx(1 / 4.5)


def test_new_keys_of_one_volunteer_do_not_renew_its_grace():
    gossip, estimates = two_peers()
    gossip.links.clear()
    for number in range(20):
        gossip.links.clear()
        now = 1e6 * (1 + number)
        gossip.link(f"{number:064x}.{'0' * 16}", 9e14, volunteer="ann", connected_at=now)
        expected = 0.5 if number == 0 else 1.0
        assert estimates.training_share(100.0, now) == expected


def test_rounds_do_not_shrink_when_a_peer_announces_a_rate():
    gossip, estimates = two_peers()
    honest = estimates.plan_round(100.0, UNKNOWN, 31.0, 1e9)
    for link in gossip.links.values():
        link.rate = 9e14
    gossip.link(f"{'d' * 64}.{'0' * 16}", rate=9e14)
    assert estimates.plan_round(100.0, UNKNOWN, 31.0, 1e9) == honest


def test_rounds_do_not_shrink_below_a_quarter_when_a_ledger_is_flooded():
    _, estimates = two_peers()
    honest = estimates.plan_round(100.0, UNKNOWN, 31.0, 1e9)
    for author in (BEN, CLEO):
        for seq in range(4, 12):
            estimates.on_update_received(update(author, seq, tokens=1 << 26), 31.0 + seq / 10)
    flooded = estimates.plan_round(100.0, UNKNOWN, 32.2, 1e9)
    assert flooded.steps >= honest.steps / 4 / math.sqrt(2)


def test_low_share_is_described_with_its_reason():
    gossip, estimates = two_peers()
    assert estimates.describe_low_share(100.0, 31.0) is None
    for link in gossip.links.values():
        link.rate, link.volunteer = 1000.0, ""  # a volunteer's own machines do not lie to it
    for author in (BEN, CLEO):
        estimates.on_update_received(update(author, 4, tokens=1 << 26), 40.0)
    reason = estimates.describe_low_share(1.0, 40.0)
    assert reason is not None and "2 others 2,000" in reason


# ---- predictions

# The prediction, in momenta, for one update of a machine like this one.
ONE_UPDATE = RECIPE.outer_rate


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
        InFlightUpdate(
            author, True, estimate_relative_sizes(published, tokens, author_rate, own_tokens, rate)
        )
        for author, published, tokens, author_rate in updates
    ]
    predictions = predict_in_flight(RECIPE, absent, 3)
    for i, prediction in enumerate(predictions):
        authors = [author for author, published, _, _ in updates if published[i]]
        counted = sum(min(MAX_IN_FLIGHT, authors.count(author)) for author in set(authors))
        assert 0 <= prediction <= counted * MAX_RELATIVE_SIZE * ONE_UPDATE * (1 + 1e-9)
        assert (prediction > 0) == bool(counted and own_tokens[i])
    half = predict_in_flight(replace(RECIPE, delay_compensation=0.5), absent, 3)
    incomplete = [replace(update, is_complete=False) for update in absent]
    streamed = predict_in_flight(RECIPE, incomplete, 3)
    assert half == streamed == pytest.approx([prediction / 2 for prediction in predictions])


def test_relative_size_grows_with_rate_and_tokens_of_each_fragment():
    assert estimate_relative_sizes([True, True], 1000, 50.0, [1000, 500], 50.0) == (1.0, 2.0)
    assert estimate_relative_sizes([True, False], 2000, 100.0, [1000, 1000], 50.0) == (4.0, 0.0), (
        "twice as fast and twice as many tokens"
    )
    assert estimate_relative_sizes([True, True], 1000, 50.0, [0, 1000], 50.0) == (0.0, 1.0), (
        "this machine has no update of its own to compare with"
    )
    assert estimate_relative_sizes([True, True], 1000, 50.0, [1000, 1000], 0.0) == (0.0, 0.0)


def test_predict_in_flight_counts_update_until_it_arrives():
    gossip, estimates = two_peers()
    assert estimates.predict_in_flight([], 100.0, 31.0) == (0.0,) * FRAGMENTS
    assert estimates.predict_in_flight([update(BEN, 4)], 100.0, 31.0) == pytest.approx(
        (ONE_UPDATE,) * FRAGMENTS
    )
    gossip.links["b" * 64].rate = 700.0
    assert estimates.predict_in_flight([update(BEN, 4)], 100.0, 31.5) == pytest.approx(
        (ONE_UPDATE,) * FRAGMENTS
    ), "the prediction does not change with the rate"
    updates = [update(CLEO, 4), update(BEN, 4), update(f"{'d' * 64}.{'0' * 16}", 50)]
    assert estimates.predict_in_flight(updates, 100.0, 32.0) == pytest.approx(
        (2 * ONE_UPDATE,) * FRAGMENTS
    ), "an unknown peer has no estimate"
    estimates.on_update_received(update(BEN, 4), 33.0)
    estimates.on_update_received(update(CLEO, 4), 33.0)
    assert estimates.predict_in_flight([], 100.0, 33.0) == (0.0,) * FRAGMENTS


def test_predict_in_flight_streamed_update_predicts_only_its_fragments():
    _, estimates = two_peers()
    estimates.on_update_published(update(ME, 4, 500, published=[2]), 40.0)
    in_flight = [update(BEN, 4, published=[0]), update(CLEO, 4, published=[2, 3])]
    predictions = estimates.predict_in_flight(in_flight, 100.0, 31.0)
    expected = (ONE_UPDATE / 2, 0.0, ONE_UPDATE, ONE_UPDATE / 2, 0.0)
    assert predictions[:5] == pytest.approx(expected), (
        "this machine's update of fragment 2 was half as large"
    )
    assert not any(predictions[5:])


def test_predict_in_flight_counts_first_few_updates_of_an_author():
    _, estimates = two_peers()
    updates = [
        update(BEN, seq, published=[0] if seq % 2 else [0, 1]) for seq in reversed(range(4, 12))
    ]
    assert estimates.predict_in_flight(updates, 100.0, 31.0)[:3] == pytest.approx(
        (MAX_IN_FLIGHT * ONE_UPDATE / 2, MAX_IN_FLIGHT * ONE_UPDATE / 2, 0.0)
    )


def test_predict_in_flight_ignores_overdue_peers():
    _, estimates = two_peers()
    assert all(estimates.predict_in_flight([update(BEN, 4)], 100.0, 69.0))
    assert not any(estimates.predict_in_flight([update(BEN, 4)], 100.0, 71.0)), (
        "four of its rounds have passed"
    )


def test_predict_in_flight_without_speculation_is_zero():
    _, estimates = two_peers(replace(RECIPE, delay_compensation=0.0))
    assert not any(estimates.predict_in_flight([update(BEN, 4)], 100.0, 31.0))


def test_plan_round_streams_strategy_splits_the_aligned_round():
    _, estimates = two_peers(replace(RECIPE, strategy="streams", round_steps=30))
    clock = 1e9 + 0.5
    _, aligned = two_peers(replace(RECIPE, round_steps=30))
    window = aligned.plan_round(500.0, UNKNOWN, 31.0, clock)
    assert estimates.plan_round(500.0, UNKNOWN, 31.0, clock, allow_streaming=False) == window
    first = estimates.plan_round(500.0, UNKNOWN, 31.0, clock)
    assert (first.steps, first.period) == (window.steps, window.period)
    assert clock < first.ends_at <= window.ends_at
    assert len(first.streaming.ends) > 1
    estimates.on_update_published(update(ME, 4), first.ends_at)
    second = estimates.plan_round(500.0, UNKNOWN, 31.0, first.ends_at)
    assert set(first.fragments_due(first.ends_at)) == set(range(14)), (
        "all fragments, because none was published before"
    )
    assert second.ends_at > first.ends_at
    assert set(second.fragments_due(second.ends_at)) in map(set, second.streaming.parts)


# ---- peers that are lost


def test_machine_that_loses_all_peers_at_once_keeps_its_share():
    """It is most likely cut off itself, and they train on."""
    gossip, estimates = two_peers()
    assert estimates.training_share(100.0, 0.0) == pytest.approx(1 / 3)
    assert estimates.training_share(100.0, 31.0) == pytest.approx(1 / 3)
    gossip.links.clear()
    assert estimates.training_share(100.0, 60.0) == pytest.approx(1 / 3)
    shares = [estimates.training_share(100.0, 10.0**exponent) for exponent in range(2, 6)]
    assert shares == sorted(shares) and shares[-1] > 0.99, "they are likelier to be gone"


def test_peers_that_said_goodbye_or_pause_do_not_count_once_lost():
    gossip, estimates = two_peers()
    for now in (0.0, 31.0):
        estimates.training_share(100.0, now)
    gossip.links.clear()
    ben, cleo = (author.partition(".")[0] for author in (BEN, CLEO))
    gossip.ended[ben] = None
    assert estimates.training_share(100.0, 60.0) == pytest.approx(1 / 2)
    paused = gossip.link(CLEO, rate=0.0)
    paused.has_state = True
    assert estimates.training_share(100.0, 75.0) == 1.0
    del gossip.links[cleo]
    gossip.ended[cleo] = None
    assert estimates.training_share(100.0, 75.0) == 1.0


def test_machine_that_is_cut_off_does_not_pile_up_updates_for_its_uplink():
    """What it publishes meanwhile must be sent to all peers once they are back."""
    gossip, estimates = two_peers(replace(RECIPE, codec="auto", strategy="async"))
    uplink, rate = 1e4, 100.0
    estimates.training_share(rate, 0.0)
    estimates.training_share(rate, 31.0)

    def bytes_per_step(now: float) -> float:
        schedule = estimates.plan_round(rate, UplinkUse(uplink, copies=2.0), now, 1e9)
        return schedule.scheme.payload_size(MODEL.parameters) / schedule.steps

    linked = bytes_per_step(31.0)
    gossip.links.clear()
    assert bytes_per_step(500.0) <= 1.01 * linked
    gossip.ended |= {author.partition(".")[0]: None for author in (BEN, CLEO)}
    assert bytes_per_step(500.0) > 1.5 * linked, "nobody else will need them"


def test_plan_round_leaves_the_uplink_for_copies_and_relayed_updates():
    """A machine has twelve links at most; what reaches further peers is relayed."""

    def seconds(**use) -> float:
        gossip, estimates = two_peers(replace(RECIPE, codec="auto", strategy="async"))
        for number in range(10):
            gossip.link(f"{number:064x}.{'0' * 16}")
        plan = estimates.plan_round(1e4, UplinkUse(1e5, **use), 31.0, 1e9)
        assert plan.scheme.dense
        return plan.steps * step_seconds

    step_seconds = RECIPE.step_sequences * MODEL.context / 1e4
    whole = seconds()
    assert seconds(copies=12.0) == pytest.approx(12 * whole, rel=0.02)
    assert seconds(relayed=4e4) == pytest.approx(2 * whole, rel=0.02)
    assert seconds(relayed=1e9) == pytest.approx(12 * whole, rel=0.02), "each receives so many"
    carried = 0.8 * 2e6 / (12 * 11)
    assert seconds(carrier=2e6) == pytest.approx(whole * 8e4 / carried, rel=0.02)


def test_machines_that_are_late_with_their_rounds_need_the_line_as_well():
    """Rounds that a full line delivers in bursts are followed by long pauses."""

    def seconds(now: float, ended: int = 0) -> float:
        gossip, estimates = two_peers(replace(RECIPE, codec="auto", strategy="async"))
        for number in range(10):
            author = f"b{number:063x}.{'0' * 16}"
            for seq in range(4):
                estimates.on_update_received(update(author, 1 + seq), 31.0 + seq / 10)
            if number < ended:
                gossip.ended[author.partition(".")[0]] = None
        plan = estimates.plan_round(1e4, UplinkUse(1e5, carrier=2e6), now, 1e9)
        return plan.steps * RECIPE.step_sequences * MODEL.context / 1e4

    assert seconds(31.5) == seconds(31.0 + GRACE_SECONDS)
    assert seconds(31.5, ended=5) < seconds(31.5) / 2
    assert seconds(31.5 + GRACE_SECONDS) < seconds(31.5) / 5, "they are gone"


def test_plan_round_noise_at_the_edge_between_two_periods_keeps_one():
    uplinks = [2e8 * 0.95**n for n in range(200)]

    def plan_anew(uplink: float) -> RoundSchedule:
        _, estimates = two_peers(replace(RECIPE, codec="auto"))
        return estimates.plan_round(100.0, UplinkUse(uplink, copies=2.0), 31.0, 1e9)

    plans = [plan_anew(uplink) for uplink in uplinks]
    edges = [n for n in range(199) if plans[n].period != plans[n + 1].period]
    assert len(edges) > 2
    for n in edges:
        _, estimates = two_peers(replace(RECIPE, codec="auto"))
        noisy = [uplinks[n], uplinks[n + 1]] * 3
        periods = {
            estimates.plan_round(100.0, UplinkUse(uplink, copies=2.0), 31.0, 1e9).period
            for uplink in noisy
        }
        assert periods == {plans[n].period}
        slower = estimates.plan_round(100.0, UplinkUse(0.8 * uplinks[n], copies=2.0), 31.0, 1e9)
        assert slower.period == plan_anew(0.8 * uplinks[n]).period, "a real change counts at once"


def test_peers_count_until_their_second_rounds_however_long_rounds_are():
    """On a slow uplink the second round arrives long after GRACE_SECONDS."""
    sizes = [fragment.size for fragment in MODEL.fragments()]
    spec = RunSpec(MODEL, recipe=replace(RECIPE, codec="auto"))
    gossip = FakeGossip()
    estimates = PeerEstimates(spec, gossip, ContributionMeter(sizes, seed=1))
    for author in (BEN, CLEO):
        gossip.link(author)
    tokens_per_second, uplink = 10_000.0, 100_000.0
    schedule = estimates.plan_round(tokens_per_second, UplinkUse(uplink, copies=2.0), 0.0, 1e9)
    assert schedule.period > 2 * GRACE_SECONDS
    for now in (GRACE_SECONDS + 1, 2 * schedule.period):
        assert estimates.training_share(tokens_per_second, now) == pytest.approx(0.98, abs=0.02)
    for link in gossip.links.values():
        link.rate = tokens_per_second
    for now in (GRACE_SECONDS + 1, 2 * schedule.period):
        assert estimates.training_share(tokens_per_second, now) == pytest.approx(1 / 3)
    assert estimates.training_share(tokens_per_second, 9 * schedule.period) > 1 / 3


POSITIVE = st.floats(min_value=1e-6, max_value=1e12)


@given(value=POSITIVE, noise=st.lists(st.floats(-0.13, 0.13)))
def test_noise_around_a_value_changes_nothing(value, noise):
    steady = SteadyValue()
    assert steady.update(value) == value
    assert all(steady.update(value * (1 + share)) == value for share in noise)


@given(values=st.lists(st.one_of(POSITIVE, st.sampled_from([0.0, math.inf])), min_size=1))
def test_value_is_never_farther_off_than_the_drift_allows(values):
    steady = SteadyValue()
    for measured in values:
        value = steady.update(measured)
        assert value == measured or abs(value - measured) <= MAX_DRIFT * min(value, measured)


def test_unknown_and_dead_lines_are_replaced_at_once():
    steady = SteadyValue()
    for measured in (math.inf, math.inf, 5.0, 0.0, 0.0, 3.0, math.inf):
        assert steady.update(measured) == measured
