"""Who dials a machine back, and how often: nobody is aimed at a third party."""

import pytest

from barnraise.peering.limits.service_limits import SERVICE_LIMITS, Service
from barnraise.peering.membership.dial_back import (
    DialBackLimits,
    Helper,
    choose_asked,
    choose_helper,
)

MACHINE = Helper("a", "ada", "93.184.216.34:1")


def choose(*helpers: Helper, met=()) -> str | None:
    """Return who dials the machine, of a peer at 5.9.1.1."""
    return choose_helper(helpers, MACHINE, met, {"5.9.1.1"})


def test_peer_that_the_machine_has_not_dialled_dials_it():
    assert choose(MACHINE, Helper("b", "ben", "8.8.8.8:1")) == "b"


@pytest.mark.parametrize(
    "helper",
    [
        Helper("b", "ben", "8.8.8.8:1"),  # it has been dialled
        Helper("c", "ada", "8.8.4.4:1"),  # it is a machine of the same person
        Helper("c", "cem", "93.184.216.34:9"),  # it is in the same home
        Helper("c", "cem", "5.9.1.1:9"),  # it shares the address of the peer that was asked
        Helper("c", "cem", "[2a00:1450::5]:9"),  # it is seen over the other version of IP
        Helper("c", "cem", ""),  # it is relayed
    ],
)
def test_peer_that_the_router_may_let_in_or_that_cannot_dial_is_not_chosen(helper):
    assert choose(helper, met=["b"]) is None


def test_one_machine_of_each_other_person_is_asked_first():
    helpers = [
        Helper("b1", "ben", "8.8.8.8:1"),
        Helper("a2", "ada", "8.8.4.4:1"),
        Helper("b2", "ben", "8.8.8.8:2"),
        Helper("c", "cem", "9.9.9.9:1"),
        Helper("d", "dan", ""),
    ]
    assert sorted(choose_asked(helpers, "ada", 2)) == ["b1", "c"]
    assert choose_asked(helpers, "ada", 9)[-1] == "a2"
    assert choose_asked([], "ada", 3) == []


def test_requests_of_one_key_of_one_network_and_of_all_are_bounded():
    limits, served = DialBackLimits(), SERVICE_LIMITS[Service.DIAL_BACKS]
    of_key = sum(limits.may_serve("a", "93.184.216.34:1", 0.0) for _ in range(50))
    assert of_key == served["key"].burst
    of_network = sum(limits.may_serve(f"{n}", f"93.184.216.{n}:1", 0.0) for n in range(50))
    assert of_key + of_network <= served["network"].burst
    of_all = sum(limits.may_serve(f"x{n}", f"9.{n}.1.1:1", 0.0) for n in range(50))
    assert of_key + of_network + of_all <= served["all"].burst
    assert limits.may_serve("a", "93.184.216.34:1", 600.0)


def test_errands_to_one_victim_are_bounded_whoever_passes_them_on():
    limits = DialBackLimits()
    done = sum(limits.may_do_errand(f"{n}", "93.184.216.34:1", 0.0) for n in range(50))
    assert done == SERVICE_LIMITS[Service.ERRANDS]["network"].burst
    done = sum(limits.may_do_errand("liar", f"9.{n}.1.1:1", 1.0) for n in range(50))
    assert done <= SERVICE_LIMITS[Service.ERRANDS]["volunteer"].burst
