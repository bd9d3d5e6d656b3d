"""Test which addresses count as those of one subscriber."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.lib.subscriber_network import subscriber_network


@given(st.integers(0, (1 << 64) - 1))
def test_all_addresses_of_a_64_are_one_network(host):
    address = ipaddress.IPv6Address((0x2A00_1450_0000_0001 << 64) + host)
    assert subscriber_network(str(address)) == "2a00:1450:0:1::/64"


@pytest.mark.parametrize(
    ("text", "network"),
    [("198.51.100.9", "198.51.100.9"), ("::ffff:198.51.100.9", "198.51.100.9"), ("", "")],
)
def test_network_of_an_ipv4_address_is_the_address(text, network):
    assert subscriber_network(text) == network
