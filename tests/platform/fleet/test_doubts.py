"""Test when a person's updates count as empty: by other people's machines, not by their number."""

from uuid import UUID

import hypothesis.strategies as st
from hypothesis import given

from coordinator.fleet.doubts import MIN_WITNESSES, is_doubted

EVE, *OTHERS = (UUID(int=number) for number in range(6))
MACHINES = st.lists(st.tuples(st.sampled_from([EVE, *OTHERS]), st.booleans()), max_size=30)


@given(MACHINES)
def test_person_is_doubted_by_two_and_half_of_the_others(machines):
    reports = [(person, "eve" if doubts else "ann") for person, doubts in machines]
    others = {person for person, _ in machines} - {EVE}
    witnesses = {person for person, doubts in machines if doubts} - {EVE}
    expected = len(witnesses) >= MIN_WITNESSES and len(witnesses) >= len(others) / 2
    assert is_doubted(EVE, "eve", reports) is expected


def test_many_machines_of_one_person_accuse_nobody():
    reports = [(OTHERS[0], "eve")] * 50 + [(OTHERS[1], None)]
    assert not is_doubted(EVE, "eve", reports)
