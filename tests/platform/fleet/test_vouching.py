"""Test which updates of an author count as vouched for: by the owner, or by two other people."""

import hypothesis.strategies as st
from hypothesis import given

from coordinator.fleet.vouching import WitnessedHead, vouched_head

AUTHOR, OWNER = "author", "owner"


def head(person: str, seq: int, total: int | None = None, branch: str = "") -> WitnessedHead:
    """Build a head of the author's chain of updates of 100 tokens, or of another branch of it."""
    total = 100 * seq if total is None else total
    return WitnessedHead(person, seq, total, f"{branch}{seq}", f"{branch}{seq - 1}")


def vouched_seq(*heads: WitnessedHead) -> int:
    """Return the number of the last vouched update; 0 for none."""
    vouched = vouched_head(heads, AUTHOR, OWNER)
    return vouched.seq if vouched else 0


def test_one_other_person_alone_vouches_for_nothing():
    assert vouched_seq() == 0
    assert vouched_seq(head("a", 5)) == 0
    assert vouched_seq(head("a", 5), head("a", 4), head("a", 6)) == 0
    assert vouched_seq(head("a", 5), head(AUTHOR, 5)) == 0


def test_two_people_vouch_up_to_the_earlier_of_their_heads():
    assert vouched_seq(head("a", 5), head("b", 3)) == 3
    assert vouched_seq(head("a", 5), head("b", 3), head("c", 4)) == 4


def test_owner_vouches_alone():
    assert vouched_seq(head(OWNER, 5)) == 5
    assert vouched_seq(head(OWNER, 5), head("a", 9)) == 5
    assert vouched_seq(head(OWNER, 5), head("a", 9), head("b", 8)) == 8
    assert vouched_head([head(OWNER, 5)], OWNER, OWNER) is None, "of the owner's own updates"


def test_author_of_two_histories_is_vouched_for_by_nobody():
    assert vouched_seq(head("a", 5), head("b", 5, branch="x")) == 0
    assert vouched_seq(head("a", 5, total=900), head("b", 6, total=600)) == 0
    assert vouched_seq(head("a", 5), head("b", 6, branch="x")) == 0, "the chain is broken"


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c", OWNER, AUTHOR]), st.integers(1, 9))),
    st.randoms(),
)
def test_vouched_head_is_the_same_in_any_order_of_witnesses(statements, random):
    heads = [head(person, seq) for person, seq in statements]
    shuffled = random.sample(heads, len(heads))
    vouched = vouched_seq(*heads)
    assert vouched == vouched_seq(*shuffled)
    reached = {person: max(s for p, s in statements if p == person) for person, _ in statements}
    others = {person: seq for person, seq in reached.items() if person != AUTHOR}
    witnesses = [person for person, seq in others.items() if seq >= vouched > 0]
    assert vouched == 0 or OWNER in witnesses or len(witnesses) >= 2
