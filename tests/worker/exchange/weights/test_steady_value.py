"""Test that noise of a measurement changes no plan, and that real changes do."""

import math

from hypothesis import given
from hypothesis import strategies as st

from barnraise.exchange.weights.steady_value import MAX_DRIFT, SteadyValue

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
