"""List this machine's own addresses, those at which others most probably reach it first.

A machine has more addresses than others can use: each bridge of a container engine or of virtual
machines has one, which means another computer everywhere else.
"""

import ipaddress
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from barnraise.peering.addresses.addresses import join_address
from barnraise.protocol.ip_addresses import is_public_ip, parse_ip

# Beginnings of the names of interfaces to containers and virtual machines on the same computer.
BRIDGE_PREFIXES = (
    "docker",
    "br-",
    "podman",
    "cni",
    "virbr",
    "veth",
    "lxcbr",
    "lxdbr",
    "incusbr",
    "flannel",
    "cali",
    "cilium",
    "kube-",
    "vmnet",
    "vboxnet",
    "vethernet",  # of Windows: WSL and Hyper-V
    "bridge100",  # of macOS: virtual machines and shared internet
)
# Nothing is sent to these addresses, which belong to documentation: the system is asked from which
# of its own addresses it would send.
_PROBES = {4: "192.0.2.1", 6: "2001:db8::1"}
CACHE_SECONDS = 10.0  # for which the list is not read again


@dataclass(frozen=True)
class InterfaceAddress:
    """One IP address of one interface.

    Attributes:
        interface: The interface's name.
        ip: The address, without a zone.
    """

    interface: str
    ip: str


def rank_addresses(
    addresses: Sequence[InterfaceAddress], default_sources: Mapping[int, str]
) -> list[str]:
    """Return the IP addresses that others may use, the most useful first. Pure.

    `default_sources` are those from which the machine sends to the internet, by version of IP.

    First come those of the interfaces with a default route, then global IPv6 addresses, then all
    others. Bridges to containers come only where there is nothing else.
    """
    sources = [default_sources[version] for version in sorted(default_sources)]
    default_interfaces = {each.interface for each in addresses if each.ip in sources}
    ranked: list[tuple[int, int, str]] = []
    for order, each in enumerate(addresses):
        try:
            ip = parse_ip(each.ip)
        except ValueError:
            continue
        if ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified:
            continue
        is_bridge = each.interface.lower().startswith(BRIDGE_PREFIXES)
        if each.ip in sources:
            rank = 0
        elif each.interface in default_interfaces:
            rank = 1
        elif is_bridge:
            rank = 4
        else:
            rank = 2 if ip.version == 6 and is_public_ip(ip) else 3
        ranked.append((rank, order, str(ip)))
    ranked.sort()
    usable = [ip for rank, _, ip in ranked if rank < 4]
    return list(dict.fromkeys(usable or [ip for _, _, ip in ranked]))


class LocalAddresses:
    """Read this machine's addresses, again after some seconds: laptops change networks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Read nothing yet; `clock` returns seconds."""
        self._clock = clock
        self._read_at = -CACHE_SECONDS
        self._ips: list[str] = []

    def list_addresses(self, ports: Mapping[int, int]) -> list[str]:
        """Return host:port of this machine, by its port for each version of IP, the best first."""
        now = self._clock()
        if now >= self._read_at + CACHE_SECONDS:
            self._read_at = now
            self._ips = rank_addresses(_read_interfaces(), read_default_sources())
        return [
            join_address(ip, ports[version])
            for ip in self._ips
            if (version := ipaddress.ip_address(ip).version) in ports
        ]


def _read_interfaces() -> list[InterfaceAddress]:
    try:
        states = psutil.net_if_stats()
        interfaces = psutil.net_if_addrs()
    except OSError:  # the system refuses to list them, as some containers do
        return [InterfaceAddress("", ip) for ip in read_default_sources().values()]
    return [
        InterfaceAddress(name, address.address.partition("%")[0])
        for name, addresses in interfaces.items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
        and (name not in states or states[name].isup)
    ]


def read_default_sources() -> dict[int, str]:
    """Return, by version of IP, the address from which this machine sends to the internet."""
    sources: dict[int, str] = {}
    for version, family in ((4, socket.AF_INET), (6, socket.AF_INET6)):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((_PROBES[version], 9))
                sources[version] = probe.getsockname()[0].partition("%")[0]
        except OSError:  # there is no route, or no such version of IP
            continue
    return sources
