"""Tests of the newcomers that a machine compares, and for how long."""

import hypothesis.strategies as st
from hypothesis import given, settings

from barnraise.exchange.trials.trial_seats import TrialSeats
from barnraise.planning.round_limits import PACE_MARGIN, TRIAL_ROUNDS, TRIAL_SEATS


def test_newcomers_beyond_the_seats_wait_until_their_turn_comes():
    seats, names = TrialSeats(), [f"v{number}" for number in range(3 * TRIAL_SEATS)]
    compared = dict.fromkeys(names, 0)
    for _ in range(12 * TRIAL_ROUNDS):
        for name in names:
            compared[name] += seats.accepts(name, 1.0, names)
        seats.on_own_round(1.0)
    assert min(compared.values()) >= 2 * TRIAL_ROUNDS


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 1.0), max_size=200), st.integers(1, 50))
def test_newcomer_that_floods_costs_as_much_as_it_may_publish(fractions, own_rounds):
    seats, cost = TrialSeats(), 0.0
    for _ in range(own_rounds):
        cost += sum(part for part in fractions if seats.accepts("x", part, ["x"]))
        seats.on_own_round(1.0)
    turns = 1 + own_rounds // TRIAL_ROUNDS
    assert cost <= PACE_MARGIN * (own_rounds + 2 * turns) + 1


def test_newcomer_that_leaves_makes_room():
    seats, names = TrialSeats(), [f"v{number}" for number in range(TRIAL_SEATS + 1)]
    assert [seats.accepts(name, 1.0, names) for name in names] == TRIAL_SEATS * [True] + [False]
    assert seats.accepts(names[-1], 1.0, names[1:])
