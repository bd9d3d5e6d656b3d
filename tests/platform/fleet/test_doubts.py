"""Test whose reports count when a person's updates are withheld: of people the owner has let in."""

from uuid import UUID

import hypothesis.strategies as st
from hypothesis import given

from barnraise.protocol.enums import Standing
from coordinator.fleet.doubts import MIN_WITNESSES, is_suspended_person

EVE, *OTHERS = (UUID(int=number) for number in range(6))
REPORTS = st.lists(
    st.tuples(st.sampled_from([EVE, *OTHERS]), st.sampled_from(["eve", "ann"])), max_size=30
)


@given(REPORTS, st.lists(st.sampled_from(Standing), min_size=6, max_size=6))
def test_person_is_suspended_by_the_owner_or_two_invited_people(named, drawn):
    standings = dict(zip([EVE, *OTHERS], drawn, strict=True))
    witnesses = {person for person, start in named if start == "eve"} - {EVE}
    invited = {person for person in witnesses if standings[person] is Standing.INVITED}
    has_owner = any(standings[person] is Standing.OWNER for person in witnesses)
    expected = has_owner or len(invited) >= MIN_WITNESSES
    assert is_suspended_person(EVE, "eve", named, standings) is expected


def test_two_unvouched_accounts_accuse_nobody():
    named = [(person, "eve") for person in OTHERS] * 9
    assert not is_suspended_person(EVE, "eve", named, dict.fromkeys(OTHERS, Standing.STRANGER))
