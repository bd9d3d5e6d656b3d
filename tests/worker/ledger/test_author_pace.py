"""Tests of how fast an author's updates enter the ledger, as a pure state machine."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from barnraise.ledger.author_pace import (
    AHEAD_SECONDS,
    BURST_SECONDS,
    INCARNATION_SECONDS,
    INCARNATIONS_BURST_SECONDS,
    MAX_UPDATES_PER_SECOND,
    MIN_UPDATES_PER_SECOND,
    SLACK_SECONDS,
    AuthorPace,
    GrowthMeter,
    PacedUpdate,
    PaceLimits,
)
from barnraise.planning.round_limits import MAX_PARTS, PACE_MARGIN
from barnraise.planning.update_header import max_header_bytes
from barnraise.protocol.messages import FragmentUpdate, Update
from barnraise.protocol.signing import Identity
from barnraise.spec import ModelSpec, Recipe, RunSpec

LIMITS = PaceLimits(round_tokens=1000.0, round_bytes=10_000)
KEY = "b" * 64


def empty_update(time: float, rate: float, key: str = KEY, size: int = 23) -> PacedUpdate:
    return PacedUpdate(key, False, size, time, rate)


def append_flood(count: int, size: int, rate: float, seconds_apart: float = 0.0) -> float:
    """Return how long updates take to enter the ledger when they are published at once."""
    pace, now = AuthorPace(LIMITS), 1e9
    for n in range(count):
        update = empty_update(1e9 + n * seconds_apart, rate, size=size)
        now = max(now, pace.ready_at(update, now))
        pace.on_update(update)
    return now - 1e9


@given(st.integers(1, 400), st.floats(1, 1e6))
def test_flood_of_empty_updates_takes_as_long_as_rounds_would(count, rate):
    per_second = LIMITS.updates_per_second(rate)
    assert per_second <= MAX_UPDATES_PER_SECOND
    seconds = append_flood(count, 23, rate)
    assert seconds == pytest.approx(max(0.0, (count - 1) / per_second - BURST_SECONDS), abs=1.0)


def test_updates_of_an_honest_day_arrive_at_once_at_a_late_joiner():
    """A machine of 100 tokens per second publishes a round every ten seconds, in three parts."""
    day = int(86400 / 3.3)
    pace, now = AuthorPace(LIMITS), 1e9
    for n in range(day):
        update = empty_update(now - 86400 + 3.3 * n, 200.0, size=3000)
        assert pace.ready_at(update, now) <= now
        pace.on_update(update)
        pace.on_batch(KEY, now)


def test_large_updates_are_limited_by_their_bytes():
    assert append_flood(20, 10_000, 1e4) < 5
    assert append_flood(20, 10_000_000, 1e4) > 1000


def test_keys_do_not_delay_each_other():
    pace, flood = AuthorPace(LIMITS), empty_update(1e9, 100.0, "c" * 64)
    for _ in range(1000):
        pace.on_update(flood)
    assert pace.ready_at(flood, 1e9) > 1e9 > pace.ready_at(empty_update(1e9, 100.0), 1e9)


def test_author_ahead_of_its_pace_enters_in_one_batch_a_second():
    """Ten updates a second cost ten visits to the disk a second otherwise."""
    pace, now, batches, entered = AuthorPace(LIMITS), 1e9, [], 0
    published = [empty_update(1e9 + n / 50, 1e6) for n in range(50 * 60)]  # as 50 a second arrive
    while now < 1e9 + 60:
        ready = pace.ready_at(published[entered], now)
        if ready <= now and published[entered].time <= now:
            batches.append(now)
            pace.on_batch(KEY, now)
            while published[entered].time <= now and pace.fits_batch(published[entered], now):
                pace.on_update(published[entered])
                entered += 1
        now += 0.02
    assert entered > 0.9 * MAX_UPDATES_PER_SECOND * (60 + BURST_SECONDS), "no batch admits less"
    assert len(batches) < 60 + 50 * AHEAD_SECONDS, "the first seconds' updates are in no hurry"


def test_incarnations_of_a_key_are_as_rare_as_lost_state_directories():
    """Every author costs all peers memory and room in States for ever, an update or not."""
    pace, now, begun = AuthorPace(LIMITS), 1e9, 0
    while now < 1e9 + 86400:
        update = PacedUpdate(KEY, True, 23, now, 1e6)
        now = max(now, pace.ready_at(update, now))
        pace.on_update(update)
        begun += 1
    assert begun <= (86400 + INCARNATIONS_BURST_SECONDS) / INCARNATION_SECONDS + 2


@pytest.mark.parametrize("strategy", ["streams", "windows", "async"])
@pytest.mark.parametrize("step_seconds", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("steps", [1, 10, 100])
def test_honest_machine_is_never_above_its_pace(strategy, step_seconds, steps):
    """Its ticket states twice its rate, as the site issues tickets."""
    recipe = Recipe(strategy=strategy, round_steps=steps, step_sequences=8)
    model = ModelSpec(layers=2, width=64, heads=2, context=64, vocabulary=256)
    spec = RunSpec(model=model, recipe=recipe)
    limits, step_tokens = PaceLimits.from_spec(spec), 8 * 64
    rate = 2 * step_tokens / step_seconds
    round_seconds = max(steps, 2) * step_seconds * 0.71  # a window may be shorter than the recipe
    parts = max(1, min(8, int(round_seconds / max(2.0, 2 * step_seconds))))
    updates_per_second = (1 if strategy != "streams" else parts) / round_seconds
    allowed = limits.updates_per_second(rate)
    assert updates_per_second <= allowed or allowed == MAX_UPDATES_PER_SECOND
    assert limits.round_bytes / round_seconds <= limits.bytes_per_second(rate)


@given(st.lists(st.floats(1, 1e7), min_size=1, max_size=20))
def test_headers_of_a_volunteers_keys_are_bounded_by_their_rates(rates):
    """Bound what stays on disk for ever, however a volunteer splits its rate over keys."""
    updates_per_second = sum(LIMITS.updates_per_second(rate) for rate in rates)
    most = PACE_MARGIN * MAX_PARTS * sum(rates) / LIMITS.round_tokens
    assert updates_per_second <= most + MIN_UPDATES_PER_SECOND * len(rates)
    assert updates_per_second <= MAX_UPDATES_PER_SECOND * len(rates)


def test_stored_header_is_at_most_twice_its_longest_encoding():
    fragments = len(ModelSpec(12, 768, 12, 1024, 50304).fragments())
    part = FragmentUpdate(digest="a" * 64, size=(1 << 53) - 1, sketch="a" * 16)
    update = Update(
        run="01890000-0000-7000-8000-000000000001",
        peer=KEY,
        incarnation="0" * 16,
        seq=(1 << 53) - 1,
        previous="1" * 64,
        tokens=(1 << 53) - 1,
        total=(1 << 53) - 1,
        started_ms=10**14 - 2,
        time_ms=10**14 - 1,
        ticket="2" * 64,
        volunteer="3" * 64,
        fragments=[part] * fragments,
    )
    signed = Identity(b"1" * 32).sign("update", update)
    longest = max_header_bytes(fragments)
    assert len(signed.body) <= longest
    assert len(signed.model_dump_json()) <= 2 * longest


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
