"""Tell hosts and networks of addresses apart. Pure.

A person can use every address of one network: limits that count single addresses do not bind. IPv4
addresses count by /24 and IPv6 addresses by /64, the smallest networks that providers assign.
"""

import ipaddress
from functools import lru_cache

from barnraise.protocol.ip_addresses import parse_ip

IPV4_PREFIX = 24
IPV6_PREFIX = 64
MAX_PORT = 65_535


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


def port_of(address: str) -> int:
    """Return the port of a host:port address; 0 if it has none."""
    port = address.rpartition(":")[2]
    return int(port) if port.isascii() and port.isdigit() and int(port) <= MAX_PORT else 0


def version_of(address: str) -> int:
    """Return the version of IP of a host:port address, 4 or 6."""
    return 6 if address.startswith("[") else 4


def join_address(host: str, port: int) -> str:
    """Return host:port; the host of an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> str | None:
    """Return the IP address and port that a text names in one spelling; None if it names none.

    Addresses of no single machine, of the machine itself and of one cable alone are none that a
    peer elsewhere could dial.
    """
    try:
        ip = parse_ip(host_of(text))
    except ValueError:
        return None
    port = port_of(text)
    is_useless = ip.is_unspecified or ip.is_multicast or ip.is_link_local or ip.is_loopback
    return None if is_useless or not port else join_address(str(ip), port)
