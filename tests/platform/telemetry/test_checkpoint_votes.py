"""Test which weights people confirm and dispute: each person has one vote."""

import hypothesis.strategies as st
from hypothesis import given

from coordinator.telemetry.checkpoint_votes import WeightsVote, count_votes

RIGHT, WRONG = "right", "wrong"
REPORTS = st.lists(
    st.tuples(st.sampled_from([RIGHT, WRONG, "other"]), st.sampled_from("abcdefgh")), max_size=20
)


def test_two_people_confirm_and_one_does_not():
    assert count_votes([(RIGHT, "a")]) == {RIGHT: WeightsVote(1, False, False)}
    assert count_votes([(RIGHT, "a"), (RIGHT, "b")]) == {RIGHT: WeightsVote(2, True, False)}


def test_one_liar_does_not_dispute_confirmed_weights():
    votes = count_votes([(RIGHT, "a"), (RIGHT, "b"), (WRONG, "liar")])
    assert votes == {RIGHT: WeightsVote(2, True, False), WRONG: WeightsVote(1, False, True)}


def test_person_whose_machines_contradict_each_other_has_no_vote():
    votes = count_votes([(RIGHT, "a"), (WRONG, "a"), (RIGHT, "b"), (RIGHT, "c")])
    assert votes == {RIGHT: WeightsVote(2, True, False), WRONG: WeightsVote(0, False, True)}


@given(REPORTS, st.randoms())
def test_votes_follow_people_and_not_the_number_or_order_of_reports(reports, random):
    repeated = [*reports, *random.choices(reports, k=9)] if reports else []
    random.shuffle(repeated)
    assert count_votes(repeated) == count_votes(reports)


@given(REPORTS)
def test_at_most_one_digest_is_confirmed_and_by_a_majority(reports):
    votes = count_votes(reports)
    confirmed = [vote for vote in votes.values() if vote.confirmed]
    voters = sum(vote.people for vote in votes.values())
    assert len(confirmed) <= 1
    assert all(vote.people >= 2 and 2 * vote.people > voters for vote in confirmed)


@given(REPORTS, st.sampled_from([RIGHT, WRONG]))
def test_one_more_person_disputes_nothing_alone(reports, lie):
    """Compare the votes before and after one liar reports with any number of keys."""
    before = count_votes(reports)
    after = count_votes([*reports, *[(lie, "liar")] * 3])
    for digest, vote in before.items():
        if vote.people >= 2 and vote.confirmed and not vote.disputed and digest != lie:
            lies = before[lie].people if lie in before else 0
            assert after[digest].disputed == (lies + 1 >= 2)
