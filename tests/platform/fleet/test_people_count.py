"""Test that a run's figures follow people: no number of keys, and no minority, moves them far."""

import hypothesis.strategies as st
from hypothesis import given

from coordinator.fleet.people_count import (
    SIGNED_MARGIN_PERCENT,
    RunCount,
    count_tokens,
    counted_people,
    sum_over_people,
)

OWNER = "owner"
AMOUNTS = st.integers(0, 10**15)
LEDGERS = st.lists(AMOUNTS, min_size=1, max_size=9)
HONEST = st.dictionaries(st.sampled_from(["a", "b", "c", "d", "e"]), LEDGERS, max_size=5)
LIARS = st.dictionaries(st.sampled_from(["v", "w", "x", "y", "z"]), LEDGERS, max_size=5)


def test_run_with_one_person_counts_what_that_person_reports():
    assert count_tokens({OWNER: [700]}, OWNER, {}) == RunCount(700, 1)
    assert count_tokens({"a": [700, 900, 10**15]}, OWNER, {}) == RunCount(900, 1)
    assert count_tokens({}, OWNER, {}) is None
    assert count_tokens({"a": []}, OWNER, {"a": 100}) is None


def test_owner_decides_between_two_values_in_the_middle():
    signed = {"x": 10**15, "y": 10**15}
    assert count_tokens({OWNER: [700], "x": [10**15]}, OWNER, signed) == RunCount(700, 2)
    assert count_tokens({OWNER: [700], "x": [0]}, OWNER, signed) == RunCount(700, 2)
    assert count_tokens({"x": [700], "y": [10**15]}, OWNER, signed) == RunCount(700, 2)


def test_people_without_vouched_updates_do_not_count_next_to_those_with():
    liars = {f"liar {n}": [10**15] for n in range(50)}
    assert count_tokens({OWNER: [700], **liars}, OWNER, {}) == RunCount(700, 1)
    assert count_tokens({"a": [700], "b": [690], **liars}, OWNER, {"a": 400, "b": 300}) == RunCount(
        690, 2
    )


def test_count_exceeds_signed_tokens_by_a_tenth_at_most():
    """Let three liars whose few updates others vouch for outvote one honest person."""
    ledgers = {"a": [700], "x": [10**15], "y": [10**15], "z": [10**15]}
    signed = {"a": 700, "x": 100, "y": 100, "z": 100}
    assert count_tokens(ledgers, OWNER, signed) == RunCount(1100, 4)
    # Those who vouch are away: newcomers alone do not raise the count above it either.
    assert count_tokens({"n": [10**15]}, OWNER, signed) == RunCount(1100, 1)


@given(st.dictionaries(st.sampled_from("abcdefg"), LEDGERS, min_size=1), st.randoms())
def test_count_does_not_depend_on_the_order_of_people_or_machines(ledgers, random):
    people = list(ledgers)
    random.shuffle(people)
    shuffled = {person: random.sample(ledgers[person], len(ledgers[person])) for person in people}
    assert count_tokens(shuffled, "a", {}) == count_tokens(ledgers, "a", {})


@given(HONEST, LIARS, LEDGERS, st.booleans())
def test_minority_moves_the_count_only_between_honest_values(honest, liars, owners, present):
    """Whatever a minority reports with however many keys, honest people bound the count."""
    if present:
        honest = honest | {OWNER: owners}
    liars = dict(list(liars.items())[: max(0, len(honest) - 1)])
    if not honest:
        return
    everybody = {**honest, **liars}
    count = count_tokens(everybody, OWNER, {person: 0 for person in everybody} | {"far": 1 << 60})
    values = [count_tokens({person: ledger}, "", {}) for person, ledger in honest.items()]
    tokens = [value.tokens for value in values if value]
    assert count and min(tokens) <= count.tokens <= max(tokens)


@given(HONEST, LIARS, AMOUNTS, st.dictionaries(st.sampled_from("abcvwxyz"), AMOUNTS))
def test_no_majority_raises_the_count_above_owner_and_signed_tokens(honest, liars, mine, signed):
    count = count_tokens({**honest, **liars, OWNER: [mine]}, OWNER, signed)
    limit = sum(signed.values()) * SIGNED_MARGIN_PERCENT // 100
    assert count is not None
    assert not signed or count.tokens <= max(limit, mine)


@given(st.integers(1, 40), AMOUNTS, AMOUNTS, AMOUNTS)
def test_enrolling_many_keys_with_one_value_changes_nothing(keys, lie, honest, owners):
    one = count_tokens({"a": [honest], "x": [lie], OWNER: [owners]}, OWNER, {})
    many = count_tokens({"a": [honest], "x": [lie] * keys, OWNER: [owners]}, OWNER, {})
    assert one == many


@given(st.sets(st.sampled_from("abcd")), st.sets(st.sampled_from("abcd")))
def test_somebody_counts_whenever_somebody_reports(people, vouched):
    counted = counted_people(people, "a", vouched)
    assert counted <= people and bool(counted) == bool(people)


@given(
    st.dictionaries(st.sampled_from("abcx"), st.floats(0, 1e18), min_size=1),
    st.dictionaries(st.sampled_from("abc"), st.floats(0, 1e6), min_size=1),
)
def test_reported_speed_is_bounded_by_what_others_saw(speeds, limits):
    counted = sum_over_people(speeds, "nobody", limits)
    if speeds.keys() & limits:
        assert counted <= len(speeds) * max(limits.values())
    honest = {person: min(speed, limits.get(person, 0)) for person, speed in speeds.items()}
    assert counted >= max(honest.values()), "what is vouched for did not count"


def test_keys_without_computers_count_as_fast_as_a_real_machine():
    speeds = {OWNER: 800.0, "a": 500.0, "x": 2.7e15}
    assert sum_over_people(speeds, OWNER, {"a": 1500.0}) == 800 + 500 + 800
    assert sum_over_people({"x": 5.0}, OWNER, {}) == 5.0
