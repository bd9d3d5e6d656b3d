"""Tests of weighting: the peers' training rates and each machine's share."""

import math

import pytest
from helpers.simulated_swarm import connected_gossip, key_of

from barnraise.exchange.gossip import gossip as g
from barnraise.exchange.pacing.weighting import (
    GRACE_SECONDS,
    RoundHistory,
    TrainingPeer,
    training_share,
)


def test_training_shares_of_concurrent_machines_sum_to_one():
    rates = [100.0, 300.0, 50.0]
    total = sum(
        training_share(rate, [TrainingPeer(other, 0.0) for other in rates if other != rate], 1e6)
        for rate in rates
    )
    assert total == pytest.approx(1.0)
    assert training_share(100.0, [], 0.0) == 1.0


def test_set_progress_publishes_only_changed_rates():
    me, now = connected_gossip(1, 2), 10.0

    def sends_state(rate: float, complete: bool = False) -> bool:
        nonlocal now
        me.set_progress(rate, complete)
        now += g.MIN_STATE_INTERVAL
        me.links[key_of(2)].next_state_at = math.inf  # no periodic State, only changes
        actions = [action for action in me.next_actions(now) if isinstance(action, g.SendState)]
        for action in actions:
            me.build_state(action.to, now)
        return bool(actions)

    assert sends_state(100.0)
    assert [sends_state(rate) for rate in (103.0, 98.0, 104.9, 100.0)] == [False] * 4
    assert [sends_state(rate) for rate in (106.0, 100.0, 0.0, 1.0)] == [True] * 4
    assert sends_state(1.0, complete=True) and not sends_state(1.0, complete=True)


def test_peer_without_announced_rate_counts_as_equal_for_grace_time_only():
    peers = [TrainingPeer(0.0, connected_at=10.0)]
    assert training_share(100.0, peers, 11.0) == 0.5
    assert training_share(100.0, peers, 10.0 + GRACE_SECONDS) == 1.0


def test_corrected_rate_stays_within_a_factor_of_the_announced():
    history = RoundHistory()
    assert history.corrected_rate(100.0) == 100.0
    history.record_round(0.0, 1000)
    history.record_round(10.0, 500)
    assert history.corrected_rate(100.0) == 50.0
    history.record_round(10.1, 10**9)
    assert history.corrected_rate(100.0) == 400.0
    assert history.corrected_rate(0.0) == 0.0
