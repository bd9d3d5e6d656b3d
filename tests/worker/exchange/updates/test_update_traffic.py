"""Tests of the measured copies of own updates, and of what is relayed."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from barnraise.exchange.updates.update_traffic import UpdateTraffic


def test_nothing_is_measured_before_a_second_update():
    traffic = UpdateTraffic()
    assert (traffic.copies, traffic.relayed_rate) == (None, 0.0)
    traffic.on_sent(500, is_own=False)
    traffic.on_published(100, 10.0)
    traffic.on_sent(100, is_own=True)
    assert (traffic.copies, traffic.relayed_rate) == (None, 0.0)


@given(
    copies=st.floats(1, 15),
    relayed=st.floats(0, 1e7),
    size=st.integers(1000, 10**8),
    period=st.floats(0.5, 1e4),
)
def test_steady_traffic_is_measured_as_it_is(copies, relayed, size, period):
    traffic = UpdateTraffic()
    for number in range(5):
        traffic.on_published(size, number * period)
        traffic.on_sent(int(copies * size), is_own=True)
        traffic.on_sent(int(relayed * period), is_own=False)
    assert traffic.copies == pytest.approx(copies, rel=0.01)
    assert traffic.relayed_rate == pytest.approx(relayed, rel=0.01, abs=3 / period)


def test_change_is_measured_within_a_few_updates():
    traffic = UpdateTraffic()
    for number in range(20):
        traffic.on_published(1000, float(number))
        traffic.on_sent(1000 * (13 if number < 10 else 1), is_own=True)
    assert traffic.copies < 2
