"""How fast the others train, and so what each one's share is."""

import math

import pytest
from helpers.simulated_swarm import key_of, met

from barnraise.exchange.gossip import gossip as g
from barnraise.exchange.pacing.weighting import QUIET, Fellow, Pace, weight


def test_weights_of_machines_that_train_at_once_add_up_to_one():
    rates = [100.0, 300.0, 50.0]
    total = sum(weight(r, [Fellow(o, 0.0) for o in rates if o is not r], 1e6) for r in rates)
    assert total == pytest.approx(1.0)
    assert weight(100.0, [], 0.0) == 1.0


def test_a_rate_is_told_when_it_has_moved_and_not_at_every_breath():
    me, now = met(1, 2), 10.0

    def told(rate: float, complete: bool = False) -> bool:
        nonlocal now
        me.announce(rate, complete)
        now += g.STATE_SOONEST
        me.links[key_of(2)].state_at = math.inf  # it is to hear of news alone
        found = [action for action in me.act(now) if isinstance(action, g.TellState)]
        for each in found:
            me.tell(each.to, now)
        return bool(found)

    assert told(100.0)
    assert [told(rate) for rate in (103.0, 98.0, 104.9, 100.0)] == [False] * 4
    assert [told(rate) for rate in (106.0, 100.0, 0.0, 1.0)] == [True] * 4
    assert told(1.0, complete=True) and not told(1.0, complete=True)


def test_a_peer_that_has_announced_nothing_counts_as_our_equal_for_a_while_only():
    fellow = [Fellow(0.0, since=10.0)]
    assert weight(100.0, fellow, 11.0) == 0.5
    assert weight(100.0, fellow, 10.0 + QUIET) == 1.0


def test_the_ledger_corrects_what_a_peer_says_of_itself_within_a_factor():
    pace = Pace()
    assert pace.rate(100.0) == 100.0
    pace.note(0.0, 1000)
    pace.note(10.0, 500)
    assert pace.rate(100.0) == 50.0
    pace.note(10.1, 10**9)
    assert pace.rate(100.0) == 400.0
    assert pace.rate(0.0) == 0.0
