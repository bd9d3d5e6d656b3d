"""Tell hosts and networks of addresses apart. Pure.

A person can use every address of one network: limits that count single addresses do not bind. IPv4
addresses count by /24 and IPv6 addresses by /64, the smallest networks that providers assign.
"""

import ipaddress
from functools import lru_cache

from barnraise.protocol.ip_addresses import parse_ip

IPV4_PREFIX = 24
IPV6_PREFIX = 64


@lru_cache(8192)
def host_of(address: str) -> str:
    """Return the host of a host:port address; an IPv4 host that is mapped to IPv6 is IPv4."""
    host = address.rpartition(":")[0] or address
    host = host.strip("[]")
    try:
        return str(parse_ip(host))
    except ValueError:
        return host.lower()


@lru_cache(8192)
def network_of(address: str) -> str:
    """Return the network of a host:port address; the host itself where it is not an IP address."""
    host = host_of(address)
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return host
    prefix = IPV4_PREFIX if version == 4 else IPV6_PREFIX
    return str(ipaddress.ip_network(f"{host}/{prefix}", strict=False))
