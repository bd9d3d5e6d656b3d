"""Tests of weighting: the peers' training rates and each machine's share."""

import math
import statistics

import hypothesis.strategies as st
import pytest
from helpers.network.simulated_swarm import connected_gossip, key_of
from hypothesis import given

from barnraise.exchange.gossip import gossip as g
from barnraise.exchange.gossip.state_intervals import STATE_INTERVALS
from barnraise.exchange.weights.weighting import (
    FULL_AGREEMENT,
    GRACE_SECONDS,
    MAX_EXCESS,
    MIN_ROUND_FRACTION,
    LostPeers,
    PeerClaim,
    RoundHistory,
    contribution_factors,
    credible_rates,
    limit_volunteers,
    training_share,
    typical_step_seconds,
)

RATES = st.floats(0.1, 1e6)
AGREEMENTS = st.dictionaries(st.sampled_from(("ann", "ben")), st.floats(-1, 1))
ANNOUNCED = st.none() | st.floats(0, 1e15)
CLAIMS = st.builds(
    PeerClaim, st.sampled_from(("", "ann", "ben")), ANNOUNCED, st.none() | RATES, st.floats(0, 200)
)


@given(st.lists(RATES, min_size=1, max_size=20))
def test_training_shares_of_measured_machines_sum_to_one(rates):
    def share(own: int) -> float:
        claims = [PeerClaim(str(n), r, r) for n, r in enumerate(rates) if n != own]
        return training_share(rates[own], credible_rates(rates[own], claims, 1e6))

    assert sum(share(own) for own in range(len(rates))) == pytest.approx(1.0)


@given(RATES, st.lists(CLAIMS, max_size=20), st.floats(0, 400))
def test_credible_rates_are_bounded_by_measurement_and_own_rate(own, claims, now):
    rates = credible_rates(own, claims, now)
    assert len(rates) == len(claims)
    for claim, rate in zip(claims, rates, strict=True):
        assert 0 <= rate <= (own if claim.measured is None else MAX_EXCESS * claim.measured)
        if claim.announced:
            assert rate <= claim.announced * (1 + 1e-9)
    for volunteer in ("ann", "ben"):
        new = [
            rate
            for claim, rate in zip(claims, rates, strict=True)
            if claim.volunteer == volunteer and claim.measured is None
        ]
        assert sum(new) <= own * (1 + 1e-9), "the new machines of one volunteer count as one"
    assert 0 < training_share(own, rates) <= 1


@given(RATES, st.lists(RATES, max_size=5), st.floats(0, 1e15))
def test_one_unproven_volunteer_takes_at_most_half_of_the_weight(own, honest, claimed):
    claims = [PeerClaim(str(n), rate, rate) for n, rate in enumerate(honest)]
    before = training_share(own, limit_volunteers(own, claims, honest, {}))
    among_liars = [*claims, PeerClaim("eve", claimed, claimed), PeerClaim("eve", 0.0, claimed)]
    rates = limit_volunteers(own, among_liars, [*honest, claimed, claimed], {})
    assert training_share(own, rates) >= before / 2 * (1 - 1e-9)


@given(RATES, st.lists(CLAIMS, max_size=20), AGREEMENTS)
def test_unproven_volunteers_outweigh_neither_the_proven_nor_the_slower(own, claims, agreements):
    rates = credible_rates(own, claims, 1e6)
    limited = limit_volunteers(own, claims, rates, agreements)
    factors = contribution_factors(agreements)
    sums = {name: 0.0 for name in ("", "ann", "ben")}
    for claim, rate, most in zip(claims, limited, rates, strict=True):
        sums[claim.volunteer] += rate
        assert 0 <= rate <= most * factors.get(claim.volunteer, 1.0) * (1 + 1e-9)
        if not claim.volunteer or agreements.get(claim.volunteer, 0.0) >= FULL_AGREEMENT:
            assert rate == most, "the own machines do not lie, and these contribute"
    unproven = [name for name in ("ann", "ben") if agreements.get(name, 0.0) < FULL_AGREEMENT]
    for name in unproven:
        rest = sum(rate for other, rate in sums.items() if other != name)
        assert sums[name] <= (own + rest) * (1 + 1e-9)


def test_equal_volunteers_count_in_full():
    claims = [PeerClaim(name, 100.0, 100.0) for name in ("ann", "ben", "cleo")]
    assert limit_volunteers(100.0, claims, [100.0] * 3, {}) == [100.0] * 3


def test_volunteer_that_contributes_counts_in_full_however_fast():
    claims = [PeerClaim("ann", 900.0, 900.0), PeerClaim("ben", 900.0, 900.0)]
    assert limit_volunteers(100.0, claims, [900.0, 900.0], {"ann": 0.4}) == [900.0, 900.0]
    assert limit_volunteers(100.0, claims, [900.0, 900.0], {}) == [100.0, 200.0]
    agreements = {"ann": 0.4, "ben": 0.01}
    assert limit_volunteers(100.0, claims, [900.0, 900.0], agreements) == [900.0, 0.0]


def test_inflated_rate_before_two_rounds_counts_as_own_and_then_as_nothing():
    liar = [PeerClaim("ann", announced=9e14, met_at=10.0)]
    assert training_share(100.0, credible_rates(100.0, liar, 11.0)) == 0.5
    assert training_share(100.0, credible_rates(100.0, liar, 10.0 + GRACE_SECONDS)) == 1.0


def test_inflated_rate_after_two_rounds_counts_by_its_rounds():
    liar = [PeerClaim("ann", announced=9e14, measured=10.0)]
    assert credible_rates(100.0, liar, 1e6) == [MAX_EXCESS * 10.0]
    modest = [PeerClaim("ann", announced=4.0, measured=10.0)]
    assert credible_rates(100.0, modest, 1e6) == [4.0]


def test_many_keys_of_one_volunteer_that_announce_rates_count_as_one():
    liars = [PeerClaim("ann", announced=9e14) for _ in range(12)]
    assert training_share(100.0, credible_rates(100.0, liars, 1.0)) == pytest.approx(0.5)


@given(st.floats(1e-3, 1e3), st.lists(st.floats(0, 1e15), max_size=30))
def test_rounds_do_not_shrink_by_what_peers_claim(seconds, measured):
    typical = typical_step_seconds(seconds, 1000, measured)
    assert typical >= MIN_ROUND_FRACTION * seconds


@given(st.lists(RATES, min_size=2, max_size=9), st.floats(0, 1e15))
def test_one_liar_moves_the_typical_step_only_within_the_honest_ones(honest, claimed):
    own, *others = honest
    typical = typical_step_seconds(1000 / own, 1000, [*others, claimed])
    slowest, fastest = 1000 / min(honest), 1000 / max(honest)
    least = min(fastest, statistics.median(1000 / rate for rate in honest))
    if len(honest) > 2:
        assert typical <= slowest * (1 + 1e-9)
        assert typical >= min(least, fastest) * (1 - 1e-9) or typical == pytest.approx(
            MIN_ROUND_FRACTION * 1000 / own
        )


def test_set_progress_publishes_only_changed_rates():
    me, now = connected_gossip(1, 2), 10.0

    def sends_state(rate: float, complete: bool = False) -> bool:
        nonlocal now
        me.set_progress(rate, complete)
        now += STATE_INTERVALS.shortest_seconds
        me.links[key_of(2)].next_state_at = math.inf  # no periodic State, only changes
        actions = [action for action in me.next_actions(now) if isinstance(action, g.SendState)]
        for action in actions:
            me.build_state(action.to, now)
        return bool(actions)

    assert sends_state(100.0)
    assert [sends_state(rate) for rate in (103.0, 98.0, 104.9, 100.0)] == [False] * 4
    assert [sends_state(rate) for rate in (121.0, 96.0, 0.0, 1.0)] == [True] * 4
    assert sends_state(1.0, complete=True) and not sends_state(1.0, complete=True)


def test_peer_without_announced_rate_counts_as_equal_for_grace_time_only():
    peers = [PeerClaim("ann", announced=0.0, met_at=10.0)]
    assert training_share(100.0, credible_rates(100.0, peers, 11.0)) == 0.5
    assert training_share(100.0, credible_rates(100.0, peers, 10.0 + GRACE_SECONDS)) == 1.0


def test_round_history_measures_rounds_and_begins_again_after_a_gap():
    history = RoundHistory()
    history.record_round(0.0, 1000)
    assert history.measured_rate(1.0) is None
    history.record_round(10.0, 500)
    assert history.measured_rate(10.0) == 50.0
    history.record_round(10.0, 500)
    assert history.measured_rate(50.0) == 100.0, "updates that arrive together are one round"
    assert history.measured_rate(50.1) == 0.0, "four rounds have passed"
    history.record_round(1000.0, 500)
    assert history.measured_rate(1000.0) is None, "it was away"
    history.record_round(1010.0, 500)
    assert history.measured_rate(1010.0) == 50.0


def test_backlog_that_arrives_at_once_counts_over_its_stated_time():
    history = RoundHistory()
    for n in range(5):
        history.record_round(100.0 + n / 100, 500, stated_at=1000.0 + 10 * n)
    assert history.measured_rate(100.05) == 50.0


@given(
    st.dictionaries(st.sampled_from("abcd"), st.floats(1.0, 1e6), min_size=1),
    st.floats(0, 1e5),
    st.floats(0, 1e6),
)
def test_lost_peers_count_in_full_for_as_long_as_they_trained(rates, together, alone):
    lost = LostPeers()
    assert lost.rate((), 50.0) == 0.0, "there were none"
    lost.on_peers(rates, 100.0)
    lost.on_peers({**rates, "idle": 0.0}, 100.0 + together)
    now = 100.0 + together + alone
    total = sum(rates.values())
    counted = lost.rate((), now)
    assert 0 <= counted <= total * (1 + 1e-9)
    if alone <= 0.999 * together:
        assert counted == pytest.approx(total)
    else:
        assert counted * alone == pytest.approx(total * together, rel=1e-2, abs=1e-6 * total)
    assert lost.rate((), now + 10.0) <= counted * (1 + 1e-9), "they are likelier to be gone"
    assert lost.rate(rates, now) == 0.0, "they said that they do not train"
