"""Tests of the count of tokens: nobody counts the same time twice, in any order."""

import hypothesis.strategies as st
from hypothesis import given, settings

from barnraise.ledger.token_count import TokenClaim, count_tokens

RATE = 7  # tokens a millisecond that the tickets in these tests allow
KEY, OTHER_KEY = "a" * 64, "b" * 64


def author(incarnation: int, key: str = KEY) -> str:
    return f"{key}.{incarnation:016x}"


@st.composite
def claims_within_the_rate(draw) -> TokenClaim:
    """Draw what an incarnation states that uses its ticket as far as it allows, or less far."""
    started = draw(st.integers(0, 500))
    duration = draw(st.integers(1, 300))
    return TokenClaim(started, started + duration, draw(st.integers(0, RATE * duration)))


def covered_milliseconds(claims: list[TokenClaim]) -> int:
    """Return the length of the union of the claims' times."""
    return len({ms for claim in claims for ms in range(claim.started_ms, claim.time_ms)})


@given(st.lists(claims_within_the_rate(), max_size=8))
def test_many_incarnations_of_one_key_state_no_more_than_one(claims):
    of_one_key = {author(number): claim for number, claim in enumerate(claims)}
    assert 0 <= count_tokens(of_one_key) <= RATE * covered_milliseconds(claims)


@given(st.lists(st.tuples(st.integers(-5000, 900), st.integers(1, 1000)), max_size=8), st.data())
def test_header_times_of_many_incarnations_state_no_time_twice(times, data):
    """A start long before the ticket, and a renewal at twice the rate, gain nothing.

    A ticket of RATE is issued at 0, and one of twice that at 500.
    """
    claims = {}
    for number, (started, time) in enumerate(times):
        first_ms, renewed_ms = max(0, started), max(500, started)
        before = RATE * max(0, min(time, 500) - first_ms)
        most = before + 2 * RATE * max(0, time - renewed_ms)
        if started < time:
            claim = TokenClaim(started, time, data.draw(st.integers(most // 2, most)))
            claims[author(number)] = claim
    last = max((claim.time_ms for claim in claims.values()), default=0)
    assert count_tokens(claims) <= RATE * min(last, 500) + 2 * RATE * max(0, last - 500)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), max_size=8), st.data())
def test_incarnations_that_follow_each_other_count_completely(durations, data):
    claims, start, total = {}, 0, 0
    for number, (duration, pause) in enumerate(durations):
        tokens = data.draw(st.integers(0, RATE * duration))
        claims[author(number)] = TokenClaim(start, start + duration, tokens)
        start += duration + pause
        total += tokens
    assert count_tokens(claims) == total


@given(st.lists(claims_within_the_rate(), max_size=6), st.randoms(use_true_random=False))
def test_count_is_the_same_in_any_order_of_arrival(claims, random):
    entries = [(author(n, KEY if n % 2 else OTHER_KEY), claim) for n, claim in enumerate(claims)]
    expected = count_tokens(dict(entries))
    random.shuffle(entries)
    assert count_tokens(dict(entries)) == expected


def test_overlapping_incarnations_count_each_moment_once():
    claims = {author(1): TokenClaim(0, 1000, 7000), author(2): TokenClaim(500, 1500, 7000)}
    assert count_tokens(claims) == 10_500
    copies = {author(number): TokenClaim(0, 1000, 7000) for number in range(100)}
    assert count_tokens(copies) == 7000


@settings(max_examples=50)
@given(
    st.lists(claims_within_the_rate(), max_size=5), st.lists(claims_within_the_rate(), max_size=5)
)
def test_other_keys_do_not_change_a_keys_count(ours, theirs):
    own = {author(number): claim for number, claim in enumerate(ours)}
    others = {author(number, OTHER_KEY): claim for number, claim in enumerate(theirs)}
    assert count_tokens(own | others) == count_tokens(own) + count_tokens(others)
