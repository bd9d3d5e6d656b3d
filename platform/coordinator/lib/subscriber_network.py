"""The network of addresses that one subscriber of a provider has. Pure."""

import ipaddress
from ipaddress import IPv4Address

from barnraise.protocol.ip_addresses import parse_ip

SUBSCRIBER_PREFIX = 64  # bits of an IPv6 address that one subscriber cannot choose


def subscriber_network(text: str) -> str:
    """Return the network that one subscriber has: an IPv4 address, or the /64 of an IPv6 address.

    A limit that counted whole IPv6 addresses would count nothing: each subscriber has 2⁶⁴ of them.
    A text that is not an address is returned as it is.
    """
    try:
        address = parse_ip(text)
    except ValueError:
        return text
    if isinstance(address, IPv4Address):
        return str(address)
    return str(ipaddress.ip_network((address.packed, SUBSCRIBER_PREFIX), strict=False))
