"""Tests of what a machine sends to addresses that do not answer, as a pure state machine."""

import hypothesis.strategies as st
from hypothesis import given

from barnraise.peering.addresses.addresses import host_of, network_of
from barnraise.peering.limits import dial_limits
from barnraise.peering.limits.dial_limits import DialLimits
from barnraise.peering.limits.service_limits import SERVICE_LIMITS, Service

ADDRESSES = [f"203.0.113.{host}:{port}" for host in (1, 2, 3) for port in range(1, 40)]


def new_limits() -> DialLimits:
    return DialLimits(lambda: 0.5)


@given(st.lists(st.tuples(st.sampled_from(ADDRESSES), st.floats(0, 20)), max_size=150))
def test_silent_hosts_and_networks_have_a_budget_of_dials(events):
    limits, now = new_limits(), 0.0
    dialled: list[str] = []
    for address, seconds in events:
        now += seconds
        if limits.choose([address], now):
            limits.on_dial([address], now)
            limits.on_silence([address], now)
            dialled.append(address)
    rates = SERVICE_LIMITS[Service.UNANSWERED_DIALS]
    for host in {host_of(address) for address in dialled}:
        count = sum(host_of(address) == host for address in dialled)
        allowed = rates["host"].burst + now * rates["host"].per_second
        assert count <= allowed + 1e-6
    networks = [network_of(address) for address in dialled]
    allowed = rates["network"].burst + now * rates["network"].per_second
    assert len(networks) <= allowed + 1e-6


def test_silent_address_backs_off_whichever_key_it_is_dialled_for():
    limits, now, waits = new_limits(), 0.0, []
    for _ in range(16):
        started_at = now
        while not limits.choose(["198.51.100.1:9"], now):
            now += 0.25
        waits.append(now - started_at)
        limits.on_dial(["198.51.100.1:9"], now)
        limits.on_silence(["198.51.100.1:9"], now)
    assert waits == sorted(waits)
    assert waits[-1] >= 0.7 * dial_limits.UNPROVEN_ADDRESS.most_seconds


def test_address_named_with_one_that_answers_is_not_proven():
    """A peer names its own address and a victim's: only its own is proven by the link."""
    limits = new_limits()
    both = ["192.0.2.7:1", "203.0.113.9:53"]
    limits.on_dial(both, 0.0)
    limits.on_answer(both, "192.0.2.7:1", 0.0)
    assert limits.is_proven("192.0.2.7:1") and not limits.is_proven("203.0.113.9:53")
    assert limits.choose(both, 100.0) == ("192.0.2.7:1",)


def test_at_most_three_addresses_and_two_ports_of_a_host_are_dialled():
    chosen = new_limits().choose(ADDRESSES, 0.0)
    assert len(chosen) == 3 and len({host_of(address) for address in chosen}) == 2
