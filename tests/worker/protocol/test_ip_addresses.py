"""Which addresses count as public, and which network an address belongs to."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.protocol.ip_addresses import is_public_ip, parse_ip

PRIVATE = ["127.0.0.1", "10.0.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"]


def spellings(address: str) -> list[str]:
    """Return the IPv6 addresses through which a gateway or a system reaches an IPv4 address."""
    value = int(ipaddress.IPv4Address(address))
    prefixes = {
        "mapped": int(ipaddress.IPv6Address("::ffff:0:0")),
        "compatible": 0,
        "translated": int(ipaddress.IPv6Address("::ffff:0:0:0")),
        "NAT64": int(ipaddress.IPv6Address("64:ff9b::")),
        "local NAT64": int(ipaddress.IPv6Address("64:ff9b:1::")),
        "Teredo": int(ipaddress.IPv6Address("2001::")),
    }
    found = [str(ipaddress.IPv6Address(prefix + value)) for prefix in prefixes.values()]
    six_to_four = ipaddress.IPv6Address((0x2002 << 112) + (value << 80))
    return [*found, str(six_to_four)]


@pytest.mark.parametrize(
    "spelling", [s for private in PRIVATE for s in (private, *spellings(private))]
)
def test_no_spelling_of_a_private_address_is_public(spelling):
    assert not is_public_ip(parse_ip(spelling))


@pytest.mark.parametrize(
    "address", ["::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1", "2001:db8::1", "4000::1"]
)
def test_private_ipv6_address_is_not_public(address):
    assert not is_public_ip(parse_ip(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "::ffff:8.8.8.8", "2600::1", "2a00:1450::1"])
def test_public_address_is_public(address):
    assert is_public_ip(parse_ip(address))


@given(st.ip_addresses(v=6))
def test_public_ipv6_address_is_global_unicast(address):
    if is_public_ip(address):
        assert address.is_global and address in ipaddress.ip_network("2000::/3")
