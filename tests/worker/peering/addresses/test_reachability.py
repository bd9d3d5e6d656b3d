"""Test which addresses a machine announces, and what proves that it is reachable."""

import pytest

from barnraise.errors import StateError
from barnraise.peering.addresses.reachability import EVIDENCE_SECONDS, OPENED_SECONDS, Reachability
from barnraise.peering.links.announced_names import MAX_ANNOUNCED, AnnouncedNames, check_announced
from barnraise.protocol.types import MAX_ADDRESSES

LOCAL = ["192.168.1.50:45555", "[2a02:8108::50]:45555", "10.8.0.2:45555"]


def reachability(*announced: str) -> Reachability:
    return Reachability(lambda: list(LOCAL), announced)


def test_announced_and_confirmed_addresses_come_first() -> None:
    reach = reachability("5.9.1.1:7000")
    reach.set_mapped("5.9.1.1:8000")
    for peer in ("1", "2"):
        reach.observed.on_report(peer, peer, "5.9.1.1:9000")
    assert reach.list_addresses(0.0) == [
        "5.9.1.1:7000",
        "5.9.1.1:8000",
        LOCAL[0],
        "5.9.1.1:9000",
        *LOCAL[1:],
    ]


def test_address_of_one_reporter_is_a_candidate_and_not_announced() -> None:
    reach = reachability()
    reach.observed.on_report("1", "1", "5.9.1.1:9000")
    assert "5.9.1.1:9000" not in reach.list_addresses(0.0)
    assert reach.list_candidates(0.0)[0] == "5.9.1.1:9000"


def test_number_of_addresses_is_bounded() -> None:
    reach = Reachability(lambda: [f"10.0.0.{n}:5" for n in range(40)])
    assert len(reach.list_addresses(0.0)) == MAX_ADDRESSES
    assert len(reach.list_candidates(0.0)) == MAX_ADDRESSES


def test_unexpected_connection_from_the_internet_proves_reachability() -> None:
    reach = reachability()
    reach.on_accepted("192.168.1.60:5", 0.0)
    reach.on_accepted("", 0.0)
    assert reach.facts(0.0).is_reached is None
    reach.on_dial(["5.9.1.2:5"], 0.0)
    reach.on_accepted("5.9.1.2:6", 1.0)
    assert reach.facts(1.0).is_reached is None, "the router was open to that host"
    reach.on_accepted("5.9.1.3:5", 1.0)
    assert reach.facts(1.0).is_reached
    assert reach.facts(1.0 + EVIDENCE_SECONDS).is_reached is None
    reach.on_accepted("5.9.1.2:6", OPENED_SECONDS)
    assert reach.facts(OPENED_SECONDS).is_reached


@pytest.mark.parametrize(
    "address",
    [
        *("", "5.9.1.1", "5.9.1.1:0", "5.9.1.1:70000", ":45555", "0.0.0.0:5", "127.0.0.1:5"),
        *("[::]:5", "a..b:5", "https://home.example.org:5", "a b:5", "[::1:5", "\udcff:5", "x/y:5"),
        *("ada@home.example.org:5", "*.example.org:5", f"{'x' * 64}.org:5", "a\u200b.org:5"),
        *("[v1.x]:5", "[5.9.1.1]:5", "xn--zzzzzzz999999.org:5"),
    ],
)
def test_announcement_that_helps_nobody_is_refused(address: str) -> None:
    with pytest.raises(StateError):
        check_announced([address])


def test_announcements_are_bounded_and_unique() -> None:
    assert check_announced(["home.example.org:5", "5.9.1.1:5", "5.9.1.1:5"]) == (
        "home.example.org:5",
        "5.9.1.1:5",
    )
    with pytest.raises(StateError, match="at most"):
        check_announced([f"5.9.1.1:{n}" for n in range(1, MAX_ANNOUNCED + 2)])


def test_announced_ip_address_needs_no_resolver() -> None:
    reach = reachability()
    AnnouncedNames(["5.9.1.1:5", "home.example.org:5"], reach)
    assert reach.list_addresses(0.0)[0] == "5.9.1.1:5"
    assert reach.facts(0.0).announced_addresses == ("5.9.1.1:5",)
