"""Tests of what most volunteers have, and of whether enough of them agree."""

import hypothesis.strategies as st
from hypothesis import given

from barnraise.exchange.gossip.agreement import (
    Votes,
    count_each_alike,
    is_agreed,
    majority_vector,
)

VECTORS = st.dictionaries(st.sampled_from("abcde"), st.integers(1, 1 << 50))
WORK = st.dictionaries(st.text("mnopq", min_size=1), st.integers(1, 1 << 40), min_size=1)


def majority_of(*vectors: dict[str, int]) -> dict[str, int]:
    """Return what most of as many volunteers have, each of whom has one vote."""
    named = dict(enumerate(vectors))
    names = {f"{number}": vector for number, vector in named.items()}
    return majority_vector(names, count_each_alike(names))


@given(st.lists(VECTORS, max_size=9))
def test_majority_vector_is_the_largest_that_more_than_half_reach(vectors):
    agreed = majority_of(*vectors)
    for author in "abcde":
        seq = agreed.get(author, 0)
        reached = sum(vector.get(author, 0) >= seq for vector in vectors)
        beyond = sum(vector.get(author, 0) > seq for vector in vectors)
        assert not vectors or 2 * reached > len(vectors)
        assert 2 * beyond <= len(vectors), "no larger one is reached by more than half"


@given(st.dictionaries(st.text("mnopq", min_size=1), VECTORS, min_size=1), st.lists(VECTORS))
def test_sybil_vectors_of_any_number_change_no_majority(honest, sybils):
    work = {name: 1000 + len(name) for name in honest}
    votes = Votes.from_work(work, work)
    crowd = {f"sybil {number}": vector for number, vector in enumerate(sybils)}
    agreed = majority_vector(honest | crowd, votes)
    assert agreed == majority_vector(honest, votes)
    for author in "abcde":
        seqs = [vector.get(author, 0) for vector in honest.values()]
        assert min(seqs) <= agreed.get(author, 0) <= max(seqs)


@given(WORK, st.integers(0, 99))
def test_sybil_work_decides_only_with_half_of_all_work(honest, crowd):
    """However many they are: they neither lower the median nor outvote who has trained more."""
    share = (sum(honest.values()) - 1) // crowd if crowd else 0
    sybils = {f"sybil {number}": share for number in range(crowd)}
    votes = Votes.from_work(honest | sybils, {*honest, *sybils})
    best = max(honest, key=lambda name: honest[name])
    assert all(votes.count([name]) <= votes.count([best]) for name in sybils)
    if len({*honest.values()}) == 1:
        assert not is_agreed(sybils, {*honest, *sybils}, "me", votes)


def test_majority_vector_does_not_depend_on_order():
    vectors = [{"a": 3}, {"a": 5, "b": 1}, {"a": 4, "b": 2}]
    assert majority_of(*vectors) == majority_of(*reversed(vectors)) == {"a": 4, "b": 1}


def test_agreement_needs_two_volunteers_and_more_than_half_of_the_votes():
    alike = count_each_alike({"ann", "ben", "liar", "liar 2"})
    assert not is_agreed({"ann"}, {"ann"}, "me", alike)
    assert is_agreed({"ann", "ben"}, {"ann", "ben"}, "me", alike)
    assert is_agreed({"ann", "ben"}, {"ann", "ben", "liar"}, "me", alike)
    assert not is_agreed({"liar", "liar 2"}, {"ann", "ben", "liar", "liar 2"}, "me", alike)
    recent = Votes.from_work({"ann": 90, "ben": 80, "cleo": 300}, {"ann", "ben"})
    assert recent.weights == {"ann": 90, "ben": 80, "cleo": 300}
    assert not is_agreed({"ann", "ben"}, {"ann", "ben", "cleo"}, "me", recent), "cleo has no vote"
    assert is_agreed({"ann", "ben"}, {"ann", "ben", "idle"}, "me", recent)


def test_own_volunteers_machine_suffices():
    nobody = Votes({}, ())
    assert is_agreed({"me"}, {"me", "liar"}, "me", nobody)
    assert not is_agreed({"ann"}, {"ann", "liar"}, "me", nobody)
    assert majority_vector({"ann": {"a": 2}, "liar": {"a": 9}}, nobody) == {}
