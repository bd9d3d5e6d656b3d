"""Rosters of crews: which machines hold what, who sends what to whom, and what is no pipeline."""

from dataclasses import replace

import pytest
from helpers.worker.crews import deal
from helpers.worker.plans import bitwise

from barnraise.errors import MessageError
from barnraise.planning.cost_model import head_flops
from barnraise.training.crew.crew_status import describe_seats

PLAN = bitwise.resident_plan(bitwise.MODEL, 4)
ROSTER = deal(PLAN, (2, 3, 3))


def with_seats(*seats):
    """Return the roster with other seats."""
    return replace(ROSTER, seating=ROSTER.seating.model_copy(update={"seats": [*seats]}))


def with_blocks(number, first_block, blocks):
    """Return the roster with other blocks of one machine."""
    seats = list(ROSTER.seats)
    changes = {"first_block": first_block, "blocks": blocks}
    seats[number] = seats[number].model_copy(update=changes)
    return with_seats(*seats)


def test_each_boundary_has_one_sender_and_one_receiver():
    found = {
        (key, sender, receiver)
        for key in range(-9, 10)
        for sender in range(3)
        for receiver in range(3)
        if sender != receiver and ROSTER.is_boundary(key, sender, receiver)
    }
    forward = {(3, 0, 1), (6, 1, 2), (9, 2, 0)}
    assert found == forward | {(-key, receiver, sender) for key, sender, receiver in forward}


def test_neighbours_are_the_lead_and_those_next_in_the_ring():
    ROSTER.validate()
    four = deal(PLAN, (2, 2, 2, 2))
    assert [four.neighbours(n) for n in range(4)] == [{1, 2, 3}, {0, 2}, {0, 1, 3}, {0, 2}]


@pytest.mark.parametrize(
    ("roster", "reason"),
    [
        (with_seats(*ROSTER.seats[:2], ROSTER.seats[1]), "two places"),
        (with_seats(*ROSTER.seats[:2]), "each block once"),
        (with_blocks(1, 3, 2), "each block once"),
        (with_blocks(1, 4, 3), "each block once"),
        (with_blocks(0, 2, 2), "each block once"),
        (with_blocks(2, 6, 4), "each block once"),
    ],
)
def test_roster_that_is_no_pipeline_is_refused(roster, reason):
    with pytest.raises(MessageError, match=reason):
        roster.validate()


def test_shares_of_flops_count_the_head_and_not_the_embedding():
    flops = list(ROSTER.flops_by_key().values())
    assert list(ROSTER.flops_by_key()) == [seat.key for seat in ROSTER.seats]
    assert flops[1] == flops[2] and flops[1] % 3 == 0
    head = 3 * head_flops(PLAN.model, 1)
    assert flops[0] == flops[1] // 3 * 2 + head


def test_seats_describe_the_lead_first_and_shares_that_sum_to_one():
    lead, second, third = describe_seats(ROSTER, {0, 2})
    assert [(seat.first_block, seat.blocks) for seat in (lead, second, third)] == [
        (1, 2),
        (3, 3),
        (6, 3),
    ]
    assert [seat.connected for seat in (lead, second, third)] == [True, False, True]
    assert lead.share + second.share + third.share == pytest.approx(1, abs=1e-3)
