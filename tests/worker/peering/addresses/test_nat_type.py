"""Test the classification of NATs: see `nat_type`."""

import pytest

from barnraise.peering.addresses.nat_type import (
    DialBack,
    NatKind,
    Observation,
    ReachFacts,
    classify_nat,
    describe_nat,
)

LOCAL = ("192.168.1.50:45555", "[2a01:db9::5]:45555")


def seen_at(*addresses: str) -> tuple[Observation, ...]:
    """Return what peers of different people see."""
    return tuple(
        Observation(f"peer {n}", f"person {n}", address) for n, address in enumerate(addresses)
    )


@pytest.mark.parametrize(
    ("addresses", "kind"),
    [
        ((), NatKind.UNKNOWN),
        (("5.9.1.1:45555",), NatKind.UNKNOWN),
        (("5.9.1.1:45555", "5.9.1.1:45555"), NatKind.SAME_PORT),
        (("5.9.1.1:61234", "5.9.1.1:61234", "192.168.1.50:45555"), NatKind.SAME_PORT),
        (("5.9.1.1:45555", "5.9.1.1:45556"), NatKind.DIFFERENT_PORT),
        (("5.9.1.1:45555", "5.9.1.2:45555"), NatKind.DIFFERENT_PORT),
        (("192.168.1.50:45555",), NatKind.NONE),
        (("192.168.1.50:45555", "5.9.1.1:45555"), NatKind.UNKNOWN),
        (("no address", "5.9.1.1:1"), NatKind.UNKNOWN),
        (("[2a01:db9::5]:45555",), NatKind.UNKNOWN),
    ],
)
def test_nat_kind_follows_from_what_two_peers_see(
    addresses: tuple[str, ...], kind: NatKind
) -> None:
    facts = ReachFacts(local_addresses=LOCAL, observations=seen_at(*addresses))
    assert classify_nat(facts) is kind


def test_nat_kind_of_ipv6_ignores_what_is_seen_of_ipv4() -> None:
    observations = seen_at("[2a01:db9::5]:45555", "5.9.1.1:1", "5.9.1.1:2")
    facts = ReachFacts(local_addresses=LOCAL, observations=observations)
    assert classify_nat(facts, 6) is NatKind.NONE
    assert classify_nat(facts, 4) is NatKind.DIFFERENT_PORT


def test_one_peer_with_two_reports_classifies_nothing() -> None:
    twice = tuple(Observation("peer", "person", f"5.9.1.1:{port}") for port in (1, 2))
    facts = ReachFacts(local_addresses=LOCAL, observations=twice)
    assert classify_nat(facts) is NatKind.UNKNOWN


def test_description_of_a_symmetric_nat_names_the_port_to_forward() -> None:
    observations = seen_at("5.9.1.1:45555", "5.9.1.1:45556")
    text = describe_nat(ReachFacts(LOCAL, observations))
    assert "symmetric NAT" in text
    assert "UDP port 45555" in text
    assert "--port 45555" in text


def test_description_follows_the_best_that_is_known() -> None:
    nat = seen_at("5.9.1.1:7", "5.9.1.1:7")
    assert describe_nat(ReachFacts(LOCAL)) == ""
    assert "when both sides dial at one time" in describe_nat(ReachFacts(LOCAL, nat))
    assert "maps 5.9.1.1:9" in describe_nat(ReachFacts(LOCAL, nat, mapped_address="5.9.1.1:9"))
    assert "reach this machine directly" in describe_nat(ReachFacts(LOCAL, nat, is_reached=True))
    own = seen_at("192.168.1.50:45555")
    assert "an address of its own" in describe_nat(ReachFacts(LOCAL, own))
    shut = (DialBack("peer 1", "192.168.1.50", False, True),)
    said = describe_nat(ReachFacts(LOCAL, own, dial_backs=shut))
    assert "allow incoming UDP 45555 in the firewall" in said
