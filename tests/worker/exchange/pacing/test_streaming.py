"""A round said in turns: every fragment once a round, and none of them late by more than its own bytes."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from barnraise.exchange.compression.scheme import Form
from barnraise.exchange.pacing import streaming as turns_module
from barnraise.exchange.pacing.round_schedule import Rhythm
from barnraise.exchange.pacing.streaming import MOST, SECONDS, STEPS, fitting, turns
from barnraise.spec import preset

SIZES = st.lists(st.integers(1, 1 << 30), min_size=1, max_size=60).map(tuple)
DENSE = Form.parse("dense2")


@given(SIZES, st.integers(1, MOST))
def test_every_fragment_has_one_turn_and_turns_end_where_the_line_has_carried_them(sizes, most):
    found = turns(sizes, most)
    assert [i for part in found.parts for i in part] == list(range(len(sizes)))
    assert 1 <= len(found.ends) == len(found.parts) <= most and all(found.parts)
    assert found.ends[-1] == 1.0 and list(found.ends) == sorted(set(found.ends))
    for end, part in zip(found.ends, found.parts, strict=True):
        assert end == pytest.approx(sum(sizes[: part.stop]) / sum(sizes))


@given(SIZES, st.integers(1, MOST))
def test_turns_are_as_even_as_whole_fragments_allow(sizes, most):
    found, total = turns(sizes, most), sum(sizes)
    for part in found.parts:
        said = sum(sizes[i] for i in part)
        assert len(part) == 1 or said <= (1 / most + 1 / (2 * most)) * total + max(
            sizes[i] for i in part
        )


@given(SIZES, st.integers(1, MOST), st.lists(st.floats(0, 1e9), min_size=1, max_size=3), st.data())
def test_whoever_asks_whenever_nothing_is_left_out_and_nothing_comes_twice_in_a_round(
    sizes, most, begins, data
):
    """Steps of any length: what was due at their ends, put together, is every fragment once a round."""
    found = turns(sizes, most)
    for begin in begins:
        at, said = begin, [0] * len(sizes)
        while at < begin + 3:
            now = at + data.draw(st.floats(0.01, 0.9))
            for i in found.due(at, now):
                said[i] += 1
            at = now
        rounds = at - begin
        assert all(math.floor(rounds - 1e-5) <= times <= math.ceil(rounds + 1e-5) for times in said)
    assert found.due(begin, begin + 1.5) == frozenset(range(len(sizes)))


@given(SIZES, st.integers(1, MOST), st.floats(0, 1e9))
def test_the_next_turn_is_not_before_now_and_something_is_due_then(sizes, most, now):
    found = turns(sizes, most)
    after = found.next(now)
    assert now - 1e-6 < after <= now + 1 + 1e-5 and found.due(now, after)


def test_a_round_too_short_for_two_turns_has_one():
    sizes = tuple(fragment.size for fragment in preset("gpt2-124m").fragments())
    assert (
        len(fitting(sizes, 2 * SECONDS - 0.01, 100).ends)
        == len(fitting(sizes, 1e9, 2 * STEPS - 1).ends)
        == 1
    )
    assert len(fitting(sizes, 2 * SECONDS, 2 * STEPS).ends) == 2
    assert len(fitting(sizes, 1e9, 10_000).ends) == MOST


def test_of_gpt2_no_turn_says_more_than_the_embedding_which_is_one_fragment():
    sizes = tuple(fragment.size for fragment in preset("gpt2-124m").fragments())
    found = fitting(sizes, 60.0, 30)
    shares = [sum(sizes[i] for i in part) / sum(sizes) for part in found.parts]
    assert max(shares) == shares[0] < 0.32 and max(shares[1:]) < 0.18


# ---- rounds by them


def test_a_rounds_next_turn_ends_it_and_says_what_is_due(monkeypatch):
    monkeypatch.setattr(turns_module, "MOST", 4)
    sizes = (10, 10, 10, 10)
    whole = Rhythm(40, DENSE, ends=32.0 * 100, period=32.0)
    now = 32.0 * 99 + 1.0
    turn = whole.streamed(sizes, since=now - 1.0, now=now)
    assert (
        turn.ends == 32.0 * 99 + 8.0
        and not turn.over(1, turn.ends - 0.1)
        and turn.over(1, turn.ends)
    )
    assert set(turn.due(turn.ends)) == {0}
    assert set(turn.due(turn.ends + 9.0)) == {0, 1}, "a step that took longer than a turn"
    assert turn.due(now) is None, "a round that its steps ended: all of it"
    late = whole.streamed(sizes, since=32.0 * 97, now=now)
    assert set(late.due(now + 8.0)) == {0, 1, 2, 3}
    assert whole.due(0.0) is None


def test_a_round_without_a_window_has_no_turns():
    alone = Rhythm(10, DENSE)
    assert alone.streamed((10, 10), 0.0, 1e9) is alone
    brief = Rhythm(10, DENSE, ends=1e9, period=1.0)
    assert brief.streamed((10, 10), 0.0, 1e9 - 0.5) is brief
