"""Tests of streaming: every fragment once a round, late at most by its own transfer."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from barnraise.exchange.compression.scheme import QuantizationScheme
from barnraise.exchange.pacing import streaming as turns_module
from barnraise.exchange.pacing.round_schedule import RoundSchedule
from barnraise.exchange.pacing.streaming import (
    MAX_PARTS,
    MIN_PART_SECONDS,
    MIN_PART_STEPS,
    fit_to_round,
    split_evenly,
)
from barnraise.spec import preset

SIZES = st.lists(st.integers(1, 1 << 30), min_size=1, max_size=60).map(tuple)
DENSE = QuantizationScheme.parse("dense2")


@given(SIZES, st.integers(1, MAX_PARTS))
def test_split_evenly_each_fragment_is_in_one_part_ending_when_carried(sizes, most):
    found = split_evenly(sizes, most)
    assert [i for part in found.parts for i in part] == list(range(len(sizes)))
    assert 1 <= len(found.ends) == len(found.parts) <= most and all(found.parts)
    assert found.ends[-1] == 1.0 and list(found.ends) == sorted(set(found.ends))
    for end, part in zip(found.ends, found.parts, strict=True):
        assert end == pytest.approx(sum(sizes[: part.stop]) / sum(sizes))


@given(SIZES, st.integers(1, MAX_PARTS))
def test_split_evenly_is_as_even_as_whole_fragments_allow(sizes, most):
    found, total = split_evenly(sizes, most), sum(sizes)
    for part in found.parts:
        said = sum(sizes[i] for i in part)
        assert len(part) == 1 or said <= (1 / most + 1 / (2 * most)) * total + max(
            sizes[i] for i in part
        )


@given(
    SIZES, st.integers(1, MAX_PARTS), st.lists(st.floats(0, 1e9), min_size=1, max_size=3), st.data()
)
def test_fragments_due_over_any_calls_covers_each_fragment_once_a_round(sizes, most, begins, data):
    """Check that the fragments due after steps of any length are each due once a round."""
    found = split_evenly(sizes, most)
    for begin in begins:
        at, said = begin, [0] * len(sizes)
        while at < begin + 3:
            now = at + data.draw(st.floats(0.01, 0.9))
            for i in found.fragments_due(at, now):
                said[i] += 1
            at = now
        rounds = at - begin
        assert all(math.floor(rounds - 1e-5) <= times <= math.ceil(rounds + 1e-5) for times in said)
    assert found.fragments_due(begin, begin + 1.5) == frozenset(range(len(sizes)))


@given(SIZES, st.integers(1, MAX_PARTS), st.floats(0, 1e9))
def test_next_end_is_after_now_with_fragments_due(sizes, most, now):
    found = split_evenly(sizes, most)
    after = found.next_end(now)
    assert now - 1e-6 < after <= now + 1 + 1e-5 and found.fragments_due(now, after)


def test_fit_to_round_too_short_for_two_parts_has_one():
    sizes = tuple(fragment.size for fragment in preset("gpt2-124m").fragments())
    assert (
        len(fit_to_round(sizes, 2 * MIN_PART_SECONDS - 0.01, 100).ends)
        == len(fit_to_round(sizes, 1e9, 2 * MIN_PART_STEPS - 1).ends)
        == 1
    )
    assert len(fit_to_round(sizes, 2 * MIN_PART_SECONDS, 2 * MIN_PART_STEPS).ends) == 2
    assert len(fit_to_round(sizes, 1e9, 10_000).ends) == MAX_PARTS


def test_split_evenly_gpt2_no_part_exceeds_the_embedding():
    sizes = tuple(fragment.size for fragment in preset("gpt2-124m").fragments())
    found = fit_to_round(sizes, 60.0, 30)
    shares = [sum(sizes[i] for i in part) / sum(sizes) for part in found.parts]
    assert max(shares) == shares[0] < 0.32 and max(shares[1:]) < 0.18


# ---- rounds by them


def test_with_streaming_next_part_ends_the_round(monkeypatch):
    monkeypatch.setattr(turns_module, "MAX_PARTS", 4)
    sizes = (10, 10, 10, 10)
    whole = RoundSchedule(40, DENSE, ends_at=32.0 * 100, period=32.0)
    now = 32.0 * 99 + 1.0
    turn = whole.with_streaming(sizes, last_published_at=now - 1.0, now=now)
    assert (
        turn.ends_at == 32.0 * 99 + 8.0
        and not turn.is_over(1, turn.ends_at - 0.1)
        and turn.is_over(1, turn.ends_at)
    )
    assert set(turn.fragments_due(turn.ends_at)) == {0}
    assert set(turn.fragments_due(turn.ends_at + 9.0)) == {0, 1}, (
        "a step that took longer than a turn"
    )
    assert turn.fragments_due(now) is None, "a round that its steps ended: all of it"
    late = whole.with_streaming(sizes, last_published_at=32.0 * 97, now=now)
    assert set(late.fragments_due(now + 8.0)) == {0, 1, 2, 3}
    assert whole.fragments_due(0.0) is None


def test_with_streaming_without_period_changes_nothing():
    alone = RoundSchedule(10, DENSE)
    assert alone.with_streaming((10, 10), 0.0, 1e9) is alone
    brief = RoundSchedule(10, DENSE, ends_at=1e9, period=1.0)
    assert brief.with_streaming((10, 10), 0.0, 1e9 - 0.5) is brief
