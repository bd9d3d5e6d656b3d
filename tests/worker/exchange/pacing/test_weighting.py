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
        training_share(r, [TrainingPeer(o, 0.0) for o in rates if o is not r], 1e6) for r in rates
    )
    assert total == pytest.approx(1.0)
    assert training_share(100.0, [], 0.0) == 1.0


def test_set_progress_publishes_only_changed_rates():
    me, now = connected_gossip(1, 2), 10.0

    def told(rate: float, complete: bool = False) -> bool:
        nonlocal now
        me.set_progress(rate, complete)
        now += g.MIN_STATE_INTERVAL
        me.links[key_of(2)].next_state_at = math.inf  # it is to hear of news alone
        found = [action for action in me.next_actions(now) if isinstance(action, g.SendState)]
        for each in found:
            me.build_state(each.to, now)
        return bool(found)

    assert told(100.0)
    assert [told(rate) for rate in (103.0, 98.0, 104.9, 100.0)] == [False] * 4
    assert [told(rate) for rate in (106.0, 100.0, 0.0, 1.0)] == [True] * 4
    assert told(1.0, complete=True) and not told(1.0, complete=True)


def test_peer_without_announced_rate_counts_as_equal_for_grace_time_only():
    fellow = [TrainingPeer(0.0, connected_at=10.0)]
    assert training_share(100.0, fellow, 11.0) == 0.5
    assert training_share(100.0, fellow, 10.0 + GRACE_SECONDS) == 1.0


def test_corrected_rate_stays_within_a_factor_of_the_announced():
    pace = RoundHistory()
    assert pace.corrected_rate(100.0) == 100.0
    pace.record_round(0.0, 1000)
    pace.record_round(10.0, 500)
    assert pace.corrected_rate(100.0) == 50.0
    pace.record_round(10.1, 10**9)
    assert pace.corrected_rate(100.0) == 400.0
    assert pace.corrected_rate(0.0) == 0.0
