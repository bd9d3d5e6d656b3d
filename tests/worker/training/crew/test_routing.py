"""Micro-batches go to the holders of a span by speed, the same way for the same seed."""

from collections import Counter
from dataclasses import replace

import pytest
from helpers.worker.crews import deal
from helpers.worker.plans import bitwise
from hypothesis import given
from hypothesis import strategies as st

from barnraise.errors import MessageError
from barnraise.training.crew.routing import RouteDealer, StepRoutes

SINGLE = deal(bitwise.resident_plan(bitwise.MODEL, 8), (2, 3, 3))
WIRED = deal(bitwise.resident_plan(bitwise.MODEL, 8), (2, 3, 3), holders=(1, 2, 2))
LAST = bitwise.MODEL.layers + 1

speeds_strategy = st.fixed_dictionaries({n: st.floats(0.1, 10) for n in (1, 2, 3, 4)})


def test_spans_with_one_holder_need_no_routes():
    routes = RouteDealer(SINGLE).deal("seed", absent={1, 2})
    assert routes.as_lists() == [] and routes.is_valid()
    assert routes.members == [1, 2] and routes.micro_batches_of(2) == list(range(8))
    assert routes.neighbours(1) == {0, 2}
    assert [routes.sender_of(key, 3) for key in (3, 6, LAST, -3)] == [0, 1, 2, 1]


@given(speeds_strategy, st.text(max_size=5), st.sets(st.integers(1, 4)))
def test_each_micro_batch_has_a_present_holder_of_each_span(speeds, seed, absent):
    dealers = RouteDealer(WIRED), RouteDealer(WIRED)
    for number, seconds in speeds.items():
        for dealer in dealers:
            dealer.record(number, seconds)
    routes, again = (dealer.deal(seed, absent) for dealer in dealers)
    assert routes == again and routes.is_valid() and len(routes.routes) == 8
    for span in WIRED.spans:
        used = set(routes.members) & set(span)
        assert not used & absent or set(span) <= absent
    assert sum(len(routes.micro_batches_of(n)) for n in (1, 2)) == 8
    for m, route in enumerate(routes.routes):
        assert routes.receiver_of(3, m) == route[1] and routes.sender_of(-3, m) == route[1]
        assert routes.receiver_of(LAST, m) == 0 and routes.sender_of(LAST, m) == route[2]


@given(speeds_strategy)
def test_holders_get_micro_batches_by_their_speeds(speeds):
    dealer, dealt, steps = RouteDealer(WIRED), Counter(), 60
    for number, seconds in speeds.items():
        dealer.record(number, seconds)
    for step in range(steps):
        dealt.update(n for route in dealer.deal(str(step)).routes for n in route)
    for span in WIRED.spans[1:]:
        whole = sum(1 / speeds[n] for n in span)
        for number in span:
            expected = 1 / speeds[number] / whole
            assert dealt[number] / (8 * steps) == pytest.approx(expected, abs=0.02)


@given(speeds_strategy, st.integers(1, 50))
def test_holder_that_was_absent_does_not_catch_up(speeds, steps):
    dealer, present = RouteDealer(WIRED), RouteDealer(WIRED)
    for number, seconds in speeds.items():
        dealer.record(number, seconds)
        present.record(number, seconds)
    for step in range(steps):
        dealer.deal(str(step), absent={1})
    most = len(present.deal("back").micro_batches_of(1))
    assert abs(len(dealer.deal("back").micro_batches_of(1)) - most) <= 2


def test_measurements_move_the_average_by_a_quarter():
    dealer = RouteDealer(WIRED)
    for number in (1, 2, 3, 4):
        dealer.record(number, 1.0)
    dealer.record(1, 29.0)  # now 8
    dealt = Counter()
    for step in range(9):
        dealt.update(route[1] for route in dealer.deal(str(step)).routes)
    assert dealt[1] in (7, 8, 9)


@pytest.mark.parametrize(
    "routes",
    [[[0, 1, 3]] * 7, [[0, 1]] * 8, [[0, 3, 1]] * 8, [[0, 0, 3]] * 8],
)
def test_routes_that_the_roster_does_not_imply_are_not_valid(routes):
    assert StepRoutes(WIRED, [[0, 1, 3]] * 8).is_valid()
    assert not StepRoutes(WIRED, routes).is_valid()


def test_lead_shares_its_span_with_nobody():
    lead, *others = WIRED.seats
    second = lead.model_copy(update={"key": 64 * "a"})
    seating = WIRED.seating.model_copy(update={"seats": [lead, second, *others]})
    twice = replace(WIRED, seating=seating)
    WIRED.validate()
    with pytest.raises(MessageError):
        twice.validate()


def test_holders_of_a_span_have_channels_to_the_spans_next_to_it():
    assert WIRED.spans == ((0,), (1, 2), (3, 4))
    assert [WIRED.neighbours(n) for n in range(3)] == [{1, 2, 3, 4}, {0, 3, 4}, {0, 3, 4}]
    assert WIRED.is_boundary(6, 2, 3) and not WIRED.is_boundary(6, 1, 2)
    whole = sum(SINGLE.flops_by_key().values())
    for dealt in (None, {1: 1, 2: 3}):
        flops = WIRED.flops_by_key(dealt)
        assert sum(flops.values()) == pytest.approx(whole, rel=1e-6)
    slow, fast = (flops[WIRED.seats[n].key] for n in (1, 2))
    assert fast == pytest.approx(3 * slow, rel=1e-6)
