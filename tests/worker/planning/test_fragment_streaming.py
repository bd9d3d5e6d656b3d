"""Tests of streaming: every fragment is due once a round, as soon as it can be sent."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from barnraise.planning import fragment_streaming as streaming_module
from barnraise.planning.fragment_streaming import fit_to_round, split_evenly
from barnraise.planning.quantization_scheme import QuantizationScheme
from barnraise.planning.round_limits import MAX_PARTS, MIN_PART_SECONDS, MIN_PART_STEPS
from barnraise.planning.round_schedule import RoundSchedule
from barnraise.spec import preset

SIZES = st.lists(st.integers(1, 1 << 30), min_size=1, max_size=60).map(tuple)
DENSE = QuantizationScheme.parse("dense2")


@given(SIZES, st.integers(1, MAX_PARTS))
def test_split_evenly_puts_each_fragment_into_one_part_by_size(sizes, max_parts):
    schedule = split_evenly(sizes, max_parts)
    assert [i for part in schedule.parts for i in part] == list(range(len(sizes)))
    assert 1 <= len(schedule.ends) == len(schedule.parts) <= max_parts and all(schedule.parts)
    assert schedule.ends[-1] == 1.0 and list(schedule.ends) == sorted(set(schedule.ends))
    for end, part in zip(schedule.ends, schedule.parts, strict=True):
        assert end == pytest.approx(sum(sizes[: part.stop]) / sum(sizes))


@given(SIZES, st.integers(1, MAX_PARTS))
def test_split_evenly_is_as_even_as_whole_fragments_allow(sizes, max_parts):
    schedule, total = split_evenly(sizes, max_parts), sum(sizes)
    for part in schedule.parts:
        part_sizes = [sizes[i] for i in part]
        largest_even_part = (1 / max_parts + 1 / (2 * max_parts)) * total
        assert len(part) == 1 or sum(part_sizes) <= largest_even_part + max(part_sizes)


@given(
    SIZES, st.integers(1, MAX_PARTS), st.lists(st.floats(0, 1e9), min_size=1, max_size=3), st.data()
)
def test_fragments_due_over_any_calls_covers_each_fragment_once_a_round(
    sizes, max_parts, starts, data
):
    """Check that the fragments due after steps of any length are each due once a round."""
    schedule = split_evenly(sizes, max_parts)
    for start in starts:
        last_call, times_due = start, [0] * len(sizes)
        while last_call < start + 3:
            now = last_call + data.draw(st.floats(0.01, 0.9))
            for i in schedule.fragments_due(last_call, now):
                times_due[i] += 1
            last_call = now
        rounds = last_call - start
        assert math.floor(rounds - 1e-5) <= min(times_due)
        assert max(times_due) <= math.ceil(rounds + 1e-5)
    assert schedule.fragments_due(start, start + 1.5) == frozenset(range(len(sizes)))


@given(SIZES, st.integers(1, MAX_PARTS), st.floats(0, 1e9))
def test_next_end_is_after_now_with_fragments_due(sizes, max_parts, now):
    schedule = split_evenly(sizes, max_parts)
    end = schedule.next_end(now)
    assert now - 1e-6 < end <= now + 1 + 1e-5 and schedule.fragments_due(now, end)


def test_fit_to_round_too_short_for_two_parts_has_one():
    sizes = tuple(fragment.size for fragment in preset("gpt2-124m").fragments())
    assert len(fit_to_round(sizes, 2 * MIN_PART_SECONDS - 0.01, 100).ends) == 1
    assert len(fit_to_round(sizes, 1e9, 2 * MIN_PART_STEPS - 1).ends) == 1
    assert len(fit_to_round(sizes, 2 * MIN_PART_SECONDS, 2 * MIN_PART_STEPS).ends) == 2
    assert len(fit_to_round(sizes, 1e9, 10_000).ends) == MAX_PARTS


def test_split_evenly_gpt2_no_part_exceeds_the_embedding():
    sizes = tuple(fragment.size for fragment in preset("gpt2-124m").fragments())
    schedule = fit_to_round(sizes, 60.0, 30)
    shares = [sum(sizes[i] for i in part) / sum(sizes) for part in schedule.parts]
    assert max(shares) == shares[0] < 0.32 and max(shares[1:]) < 0.18


# ---- rounds that stream


def test_with_streaming_next_part_ends_the_round(monkeypatch):
    monkeypatch.setattr(streaming_module, "MAX_PARTS", 4)
    sizes = (10, 10, 10, 10)
    whole = RoundSchedule(40, DENSE, ends_at=32.0 * 100, period=32.0)
    now = 32.0 * 99 + 1.0
    streamed = whole.with_streaming(sizes, last_published_at=now - 1.0, now=now)
    assert streamed.ends_at == 32.0 * 99 + 8.0
    assert not streamed.is_over(1, streamed.ends_at - 0.1)
    assert streamed.is_over(1, streamed.ends_at)
    assert set(streamed.fragments_due(streamed.ends_at)) == {0}
    assert set(streamed.fragments_due(streamed.ends_at + 9.0)) == {0, 1}, (
        "a step may take longer than a part"
    )
    assert streamed.fragments_due(now) is None, (
        "a round that ends by its number of steps publishes all fragments"
    )
    late = whole.with_streaming(sizes, last_published_at=32.0 * 97, now=now)
    assert set(late.fragments_due(now + 8.0)) == {0, 1, 2, 3}
    assert whole.fragments_due(0.0) is None


def test_with_streaming_without_period_changes_nothing():
    alone = RoundSchedule(10, DENSE)
    assert alone.with_streaming((10, 10), 0.0, 1e9) is alone
    brief = RoundSchedule(10, DENSE, ends_at=1e9, period=1.0)
    assert brief.with_streaming((10, 10), 0.0, 1e9 - 0.5) is brief
