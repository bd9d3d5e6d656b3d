"""Tests of the guard against a ledger that grows faster than its machines can train."""

import hypothesis.strategies as st
from hypothesis import given, settings

from barnraise.exchange.weights.growth_meter import SLACK_SECONDS, GrowthMeter

RATE = 1000


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 100.0)), max_size=60))
def test_machines_within_their_tickets_never_grow_too_fast(updates):
    meter, now = GrowthMeter(0.0), 0.0
    last = dict.fromkeys("abc", 0.0)
    for key, seconds in updates:
        now += seconds
        meter.on_update(key, RATE, int(RATE * min(now - last[key], SLACK_SECONDS / 4)), now, now)
        last[key] = now
        assert not meter.grows_too_fast(now)


def test_hoarded_time_that_is_stated_at_once_is_noticed_for_a_while():
    meter = GrowthMeter(0.0)
    for key in range(20):
        meter.on_update(f"{key}", RATE, 3600 * RATE, time=86_400.0, now=86_400.0)
    assert meter.grows_too_fast(86_400.0) and meter.allowed_rate == 20 * RATE
    assert meter.grows_too_fast(86_400.0 + 2900) and not meter.grows_too_fast(86_400.0 + 3100)


def test_retraction_of_the_hoarders_ends_the_suspicion():
    meter = GrowthMeter(0.0)
    meter.on_update("a", RATE, 86_400 * RATE, time=86_400.0, now=86_400.0)
    assert meter.grows_too_fast(86_400.0)
    meter.on_retraction(86_400 * RATE, time=86_400.0, now=86_401.0)
    assert not meter.grows_too_fast(86_401.0)


def test_machine_that_was_away_catches_up_without_suspicion():
    meter = GrowthMeter(started_at=86_400.0)
    for hour in range(24):
        meter.on_update("a", RATE, 3600 * RATE, time=3600.0 * hour, now=86_401.0)
    assert not meter.grows_too_fast(86_401.0)
