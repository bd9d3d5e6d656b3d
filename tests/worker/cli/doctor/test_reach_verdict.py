"""The verdict on how peers reach a machine, in the situations that homes have."""

from dataclasses import replace

import pytest

from barnraise.cli.doctor.reach_verdict import (
    NetworkFacts,
    ReachVerdict,
    describe_dial_backs,
    describe_reach,
    is_behind_two_routers,
    judge_reach,
)
from barnraise.peering.addresses.nat_type import DialBack, Observation, ReachFacts

LAN = "192.168.1.50"
LOCAL = (f"{LAN}:45555",)


def seen(*addresses: str) -> tuple[Observation, ...]:
    """Return what peers of different volunteers see."""
    return tuple(Observation(f"{n}" * 64, f"{n}" * 64, a) for n, a in enumerate(addresses))


HOME = NetworkFacts(
    peers_tried=2,
    peers_connected=2,
    hops=("192.168.1.1", "93.184.216.1"),
    lan_address=LAN,
    port=45555,
    reach=ReachFacts(LOCAL, seen("93.184.216.34:45555", "93.184.216.34:45555")),
)
PUBLIC = replace(
    HOME, reach=ReachFacts(("93.184.216.34:45555",), seen("93.184.216.34:45555")), hops=()
)
FORWARDED = replace(HOME, reach=replace(HOME.reach, is_reached=True))
ANNOUNCED = replace(HOME, reach=replace(HOME.reach, announced_addresses=("93.184.216.34:45555",)))
MAPPED = replace(HOME, reach=replace(HOME.reach, mapped_address="93.184.216.34:45555"))
DOUBLE_BY_HOPS = replace(HOME, hops=("192.168.1.1", "100.64.3.1"))
DOUBLE_BY_MAPPING = replace(
    HOME, hops=("192.168.1.1", ""), reach=replace(HOME.reach, mapped_address="10.0.0.7:45555")
)
DOUBLE_BY_ROUTER = replace(HOME, reach=replace(HOME.reach, mapped_address="94.1.2.3:45555"))
SYMMETRIC = replace(HOME, reach=ReachFacts(LOCAL, seen("93.184.216.34:1111", "93.184.216.34:2222")))
BLOCKED = replace(HOME, peers_connected=0, reach=ReachFacts(LOCAL))
IPV6 = replace(
    HOME,
    has_ipv4=False,
    has_ipv6=True,
    reach=ReachFacts(("[2a00:1450::5]:45555",), seen("[2a00:1450::5]:45555")),
)


def tried(facts: NetworkFacts, *outcomes: tuple[bool, bool]) -> NetworkFacts:
    """Return the facts after peers have tried: (whether one got in, whether it was a stranger)."""
    attempts = tuple(
        DialBack(f"{n}" * 64, "93.184.216.34", *outcome) for n, outcome in enumerate(outcomes)
    )
    return replace(facts, reach=replace(facts.reach, dial_backs=attempts))


OFFLINE = NetworkFacts(has_ipv4=False, is_site_reachable=False)


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        (PUBLIC, ReachVerdict.PUBLIC),
        (FORWARDED, ReachVerdict.FORWARDED),
        (ANNOUNCED, ReachVerdict.FORWARDED),
        (MAPPED, ReachVerdict.FORWARDED),
        (HOME, ReachVerdict.NAT),
        (DOUBLE_BY_HOPS, ReachVerdict.DOUBLE_NAT),
        (DOUBLE_BY_MAPPING, ReachVerdict.DOUBLE_NAT),
        (DOUBLE_BY_ROUTER, ReachVerdict.DOUBLE_NAT),
        (SYMMETRIC, ReachVerdict.SYMMETRIC_NAT),
        (BLOCKED, ReachVerdict.UDP_BLOCKED),
        (replace(BLOCKED, peers_tried=1), ReachVerdict.PEER_SILENT),
        (IPV6, ReachVerdict.IPV6_ONLY),
        (OFFLINE, ReachVerdict.NO_NETWORK),
        (tried(PUBLIC, (True, True)), ReachVerdict.PUBLIC),
        (tried(PUBLIC, (False, True)), ReachVerdict.FIREWALL),
        (tried(HOME, (True, True)), ReachVerdict.FORWARDED),
        (tried(HOME, (True, False)), ReachVerdict.FORWARDED),
        (tried(HOME, (True, False), (False, True)), ReachVerdict.NAT),
        (tried(HOME, (False, False)), ReachVerdict.NAT),
        (tried(ANNOUNCED, (False, True)), ReachVerdict.NAT),
        (tried(MAPPED, (False, True), (True, True)), ReachVerdict.FORWARDED),
        (replace(BLOCKED, is_site_reachable=False), ReachVerdict.NO_NETWORK),
        (NetworkFacts(), ReachVerdict.UNKNOWN),
    ],
)
def test_verdict_fits_the_situation(facts, verdict):
    assert judge_reach(facts) is verdict
    sentence = describe_reach(facts)
    assert sentence.endswith(".") and sentence[0].isupper() and len(sentence) < 400


def test_outcome_of_dial_backs_is_a_sentence():
    assert "A peer reached this machine" in describe_dial_backs(tried(HOME, (True, True)))
    shut = tried(HOME, (False, True), (False, True))
    assert "No peer could reach" in describe_dial_backs(shut)
    assert "(tried by 2)" in describe_dial_backs(shut)
    alone = replace(HOME, peers_tried=0, peers_connected=0)
    assert "nobody else is online" in describe_dial_backs(alone)
    silent = replace(HOME, peers_connected=0)
    assert "no peer that the site lists answered" in describe_dial_backs(silent)
    assert "did not try" in describe_dial_backs(HOME)


def test_silent_peer_may_be_offline_and_several_may_be_too():
    assert "it is offline, or a firewall" in describe_reach(replace(BLOCKED, peers_tried=1))
    blocked = describe_reach(replace(BLOCKED, peers_tried=3))
    assert "none of the 3 peers" in blocked and "gone offline" in blocked


def test_public_address_counts_more_than_one_of_the_home():
    outside, inside = tried(HOME, (False, True)), DialBack("a" * 64, LAN, True, True)
    attempts = (*outside.reach.dial_backs, inside)
    facts = replace(outside, reach=replace(outside.reach, dial_backs=attempts))
    assert judge_reach(facts) is ReachVerdict.NAT


def test_mapping_that_peers_do_not_see_is_no_forwarded_port():
    leads_nowhere = replace(HOME.reach, announced_addresses=("93.184.216.34:9999",))
    assert judge_reach(replace(HOME, reach=leads_nowhere)) is ReachVerdict.NAT


def test_double_nat_with_a_forwarded_port_is_forwarded():
    reached = replace(DOUBLE_BY_HOPS, reach=replace(HOME.reach, is_reached=True))
    assert is_behind_two_routers(reached) and judge_reach(reached) is ReachVerdict.FORWARDED


@pytest.mark.parametrize(
    "hops", [(), ("192.168.1.1",), ("", ""), ("192.168.1.1", ""), ("192.168.1.1", "nonsense")]
)
def test_unknown_hops_prove_no_second_router(hops):
    assert not is_behind_two_routers(replace(HOME, hops=hops))


def test_remedy_names_port_and_machine():
    for facts in (HOME, SYMMETRIC):
        assert "open UDP 45555 in your router for 192.168.1.50" in describe_reach(facts)
        assert "--port 45555" in describe_reach(facts)
    assert "--port-mapping" in describe_reach(replace(HOME, has_port_mapping=False))
    assert "a UDP port" in describe_reach(
        replace(HOME, port=0, reach=ReachFacts((), seen("93.184.216.34:1", "93.184.216.34:1")))
    )
