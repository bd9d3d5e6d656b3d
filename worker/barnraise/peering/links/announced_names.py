"""Resolve the names among the addresses that a machine's owner announces, now and then."""

import asyncio
import logging
import socket
from collections.abc import Sequence

from barnraise.errors import StateError
from barnraise.peering.addresses.addresses import host_of, join_address, parse_address, port_of
from barnraise.peering.addresses.reachability import Reachability
from barnraise.peering.limits.repeated_warnings import RepeatedWarnings
from barnraise.spec import split_address

log = logging.getLogger("barnraise.exchange")

RESOLVE_SECONDS = 300.0  # between two looks: home lines get new addresses
MAX_ANNOUNCED = 8  # addresses that an owner may announce


def check_announced(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses that an owner wants to announce.

    Raises:
        StateError: One is not HOST:PORT, or nobody else could reach it.
    """
    if len(addresses) > MAX_ANNOUNCED:
        raise StateError(f"announce at most {MAX_ANNOUNCED} addresses, not {len(addresses)}")
    for address in addresses:
        host = host_of(address)
        try:
            is_whole = split_address(f"//{address}").netloc == address and "@" not in address
        except ValueError:
            is_whole = False
        if not (is_whole and host and port_of(address)):
            raise StateError(
                f"'{address}' is not HOST:PORT, like 203.0.113.7:45555 or [2001:db8::7]:45555"
            )
        is_ip = ":" in host or host.replace(".", "").isdigit()
        if (is_ip and parse_address(address) is None) or host == "localhost":
            raise StateError(f"no other machine can reach {address}: announce a public address")
    return tuple(dict.fromkeys(addresses))


class AnnouncedNames:
    """The addresses that an owner announces, whose hosts may be names."""

    def __init__(self, announced: Sequence[str], reachability: Reachability) -> None:
        """Announce IP addresses at once; `resolve_often` adds those of names."""
        self._announced = tuple(announced)
        self._reachability = reachability
        self._repeats = RepeatedWarnings(log)
        self._resolved: dict[str, list[str]] = {}
        reachability.set_announced(self._announced)

    async def resolve_often(self) -> None:
        """Resolve the names every few minutes, until cancelled."""
        while True:
            names = [address for address in self._announced if parse_address(address) is None]
            for address in names:
                await self._resolve(address)
            found = [self._resolved.get(address, [address]) for address in self._announced]
            self._reachability.set_announced([address for each in found for address in each])
            await asyncio.sleep(RESOLVE_SECONDS)

    async def _resolve(self, address: str) -> None:
        """Resolve one name; what was found before stays while nothing answers."""
        host, port = host_of(address), port_of(address)
        try:
            entries = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_DGRAM
            )
        except (OSError, UnicodeError) as error:
            self._repeats.warn(host, "the announced name %s cannot be resolved: %s", host, error)
            return
        self._resolved[address] = [join_address(str(entry[4][0]), port) for entry in entries]
