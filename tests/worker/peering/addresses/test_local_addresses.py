"""Test which of a machine's addresses it announces: see `local_addresses`."""

import pytest

from barnraise.peering.addresses.local_addresses import (
    CACHE_SECONDS,
    InterfaceAddress,
    LocalAddresses,
    rank_addresses,
)


def at(interface: str, *ips: str) -> list[InterfaceAddress]:
    return [InterfaceAddress(interface, ip) for ip in ips]


def test_default_route_comes_before_eight_docker_bridges() -> None:
    bridges = [InterfaceAddress(f"br-{n:012x}", f"172.{18 + n}.0.1") for n in range(7)]
    addresses = [
        *at("lo", "127.0.0.1", "::1"),
        *at("docker0", "172.17.0.1"),
        *bridges,
        *at("enp3s0", "192.168.1.50", "fe80::1", "2a02:8108::50"),
    ]
    assert rank_addresses(addresses, {4: "192.168.1.50"}) == ["192.168.1.50", "2a02:8108::50"]


def test_addresses_are_ranked_by_use() -> None:
    addresses = [
        *at("wlan0", "10.0.0.7"),
        *at("tun0", "2a02:8108::77"),
        *at("eth0", "fd00::2", "192.168.1.50", "2a02:8108::50"),
        *at("virbr0", "192.168.122.1"),
    ]
    assert rank_addresses(addresses, {6: "2a02:8108::50", 4: "192.168.1.50"}) == [
        "192.168.1.50",
        "2a02:8108::50",
        "fd00::2",
        "2a02:8108::77",
        "10.0.0.7",
    ]


def test_bridge_with_the_default_route_is_announced() -> None:
    addresses = [*at("br-lan", "192.168.1.1"), *at("br-guest", "192.168.2.1")]
    assert rank_addresses(addresses, {4: "192.168.1.1"}) == ["192.168.1.1"]


def test_bridges_are_announced_where_there_is_nothing_else() -> None:
    assert rank_addresses(at("docker0", "172.17.0.1"), {}) == ["172.17.0.1"]


@pytest.mark.parametrize("ip", ["fe80::1", "127.0.0.1", "::1", "224.0.0.1", "0.0.0.0", "x"])
def test_address_that_nobody_else_can_use_is_not_announced(ip: str) -> None:
    assert rank_addresses(at("eth0", ip), {}) == []


def test_addresses_have_the_port_of_their_version_of_ip() -> None:
    local = LocalAddresses()
    both = local.list_addresses({4: 5, 6: 7})
    assert all(address.endswith(":7" if address.startswith("[") else ":5") for address in both)
    only_ipv4 = [address for address in both if not address.startswith("[")]
    assert local.list_addresses({4: 5}) == only_ipv4


def test_addresses_are_read_again_after_a_while() -> None:
    now = 0.0
    local = LocalAddresses(lambda: now)
    first = local.list_addresses({4: 5})
    now = CACHE_SECONDS
    assert local.list_addresses({4: 5}) == first
