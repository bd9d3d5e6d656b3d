"""Tests of how incomplete updates share a disk, as a pure state machine."""

from hypothesis import given
from hypothesis import strategies as st

from barnraise.exchange.updates.incomplete_updates import (
    EXPIRY_SECONDS,
    ReservedTotal,
    TransferBudget,
)

LIMIT = ReservedTotal(1000, 16)


@given(
    st.lists(
        st.tuples(st.sampled_from("abcde"), st.integers(0, 400), st.integers(0, 40)), max_size=60
    )
)
def test_budget_is_never_exceeded_in_all_or_by_a_volunteer(headers):
    budget = TransferBudget(LIMIT, volunteer_count=8)
    reserved: dict[tuple[str, int], tuple[str, int]] = {}
    now = 0.0
    for number, (volunteer, size, seconds) in enumerate(headers):
        name = (volunteer, number)
        now += seconds
        dropped = budget.reserve(name, volunteer, size, now)
        if dropped is not None:
            reserved[name] = (volunteer, size)
            for other in dropped:
                del reserved[other]
        sizes = [size for _, size in reserved.values()]
        assert budget.reserved_bytes == sum(sizes) and len(budget) == len(sizes)
        assert len(sizes) <= 16 and (sum(sizes) <= 1000 or len(sizes) == 1)
        for volunteer in "abcde":
            of_volunteer = [size for who, size in reserved.values() if who == volunteer]
            assert sum(of_volunteer) <= 250 or len(of_volunteer) == 1


def test_budget_flood_of_one_volunteer_leaves_room_for_others():
    budget = TransferBudget(LIMIT, volunteer_count=8)
    accepted = [budget.reserve(("liar", n), "liar", 50, 0.0) is not None for n in range(100)]
    assert accepted == [True] * 5 + [False] * 95
    assert budget.reserve(("honest", 1), "ann", 200, 0.0) == []


def test_budget_full_of_trickled_updates_makes_room_for_who_has_less():
    budget = TransferBudget(LIMIT, volunteer_count=8)
    for n in range(20):
        budget.reserve(("liar", n), f"liar {n % 4}", 50, float(n))
        for other in range(n + 1):
            budget.record_progress(("liar", other), float(n))  # a byte now and then
    assert budget.reserve(("honest", 1), "ann", 60, 30.0) == [("liar", 0)]
    assert budget.reserve(("late liar", 1), "liar 1", 200, 31.0) is None


def test_budget_update_that_trickles_expires_in_the_end():
    budget = TransferBudget(LIMIT, volunteer_count=8)
    budget.reserve(("trickled", 1), "liar", 100, 0.0)
    for now in range(0, 1200, 50):
        budget.record_progress(("trickled", 1), float(now))
    assert budget.expired(EXPIRY_SECONDS - 1) == [] and budget.expired(1200.0) == [("trickled", 1)]


def test_budget_update_without_a_byte_makes_room_for_its_own_volunteer():
    budget = TransferBudget(LIMIT, volunteer_count=8)
    budget.reserve(("old", 1), "ann", 200, 0.0)
    assert budget.reserve(("new", 1), "ann", 200, 30.0) is None
    assert budget.reserve(("new", 1), "ann", 200, 61.0) == [("old", 1)]


def test_budget_single_update_above_it_fits():
    budget = TransferBudget(LIMIT, volunteer_count=8)
    assert budget.reserve(("large", 1), "ann", 5000, 0.0) == []
