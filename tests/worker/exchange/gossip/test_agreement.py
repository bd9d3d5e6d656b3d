"""Tests of what most volunteers have, and of whether enough of them agree."""

import hypothesis.strategies as st
from hypothesis import given

from barnraise.exchange.gossip.agreement import agreed_vector, is_agreed, majority_vector

VECTORS = st.dictionaries(st.sampled_from("abcde"), st.integers(1, 1 << 50))


@given(st.lists(VECTORS, max_size=9))
def test_majority_vector_is_the_largest_that_more_than_half_reach(vectors):
    agreed = majority_vector(vectors)
    for author in "abcde":
        seq = agreed.get(author, 0)
        reached = sum(vector.get(author, 0) >= seq for vector in vectors)
        beyond = sum(vector.get(author, 0) > seq for vector in vectors)
        assert not vectors or 2 * reached > len(vectors)
        assert 2 * beyond <= len(vectors), "no larger one is reached by more than half"


@given(st.lists(VECTORS, min_size=1, max_size=5), st.lists(VECTORS, max_size=4))
def test_majority_vector_lies_within_the_honest_ones(honest, liars):
    liars = liars[: len(honest) - 1]
    agreed = majority_vector([*honest, *liars])
    for author in "abcde":
        seqs = [vector.get(author, 0) for vector in honest]
        assert min(seqs) <= agreed.get(author, 0) <= max(seqs)


@given(st.permutations([{"a": 3}, {"a": 5, "b": 1}, {"a": 4, "b": 2}]))
def test_majority_vector_does_not_depend_on_order(vectors):
    assert majority_vector(vectors) == {"a": 4, "b": 1}


def test_agreement_needs_two_volunteers_and_more_than_half():
    assert not is_agreed({"ann"}, {"ann"}, own="me")
    assert is_agreed({"ann", "ben"}, {"ann", "ben"}, own="me")
    assert is_agreed({"ann", "ben"}, {"ann", "ben", "liar"}, own="me")
    assert not is_agreed({"liar 1", "liar 2"}, {"ann", "ben", "liar 1", "liar 2"}, own="me")
    assert not is_agreed({"liar 1", "liar 2"}, {*"abc", "liar 1", "liar 2"}, own="me")


def test_own_volunteers_machine_suffices():
    assert is_agreed({"me"}, {"me", "liar"}, own="me")
    assert agreed_vector({"me": {"a": 2}, "liar": {"a": 9}}, "me") == {"a": 2}
