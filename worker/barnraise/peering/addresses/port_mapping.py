"""Have the router forward this machine's UDP port, as long as the worker runs.

PCP and NAT-PMP are tried first, then UPnP's Internet Gateway Device. iroh's binding asks by UPnP
too, whenever it binds a socket: it has no switch for that, chooses another external port each time
and leaves the mapping behind. So a mapping that it made is removed here, whether or not this module
makes one of its own.
"""

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from barnraise.errors import MessageError
from barnraise.peering.addresses.addresses import join_address
from barnraise.peering.addresses.local_addresses import read_default_sources
from barnraise.peering.addresses.nat_pmp import (
    CONTROL_PORT,
    PCP_NONCE_BYTES,
    PortGrant,
    decode_pcp_map,
    decode_pmp_address,
    decode_pmp_map,
    encode_pcp_map,
    encode_pmp_address,
    encode_pmp_map,
)
from barnraise.protocol.ip_addresses import is_public_host, parse_ip

log = logging.getLogger("barnraise.exchange")

MAX_UPNP_ENTRIES = 200  # of a router's list that are read
DESCRIPTION = "Barnraise"
IROH_DESCRIPTION = "iroh-portmap"
ROUTES = Path("/proc/net/route")  # of Linux


@dataclass(frozen=True)
class PortMappingTimes:
    """How long routers are waited for, and how often they are asked.

    Attributes:
        lifetime_seconds: That are asked for; a mapping is renewed after half of them.
        renewal_seconds: Between two renewals at least.
        iroh_seconds: After which iroh's binding has mapped a port, if it can.
        retry_seconds: Between two attempts while no router answers.
        network_seconds: Between two looks whether this machine came to another network.
        site_seconds: In which the site's view of this machine is waited for.
        release_seconds: That leaving waits for the router.
        answer_seconds: That each of three equal requests is waited for.
        discovery_milliseconds: That UPnP's routers have to answer.
    """

    lifetime_seconds: int = 3600
    renewal_seconds: float = 60.0
    iroh_seconds: float = 4.0
    retry_seconds: float = 900.0
    network_seconds: float = 10.0
    site_seconds: float = 15.0
    release_seconds: float = 4.0
    answer_seconds: tuple[float, ...] = (0.25, 0.5, 1.0)
    discovery_milliseconds: int = 2000


TIMES = PortMappingTimes()


@dataclass(frozen=True)
class PortMapping:
    """A port that a router forwards.

    Attributes:
        protocol: "PCP", "NAT-PMP" or "UPnP".
        grant: What the router answered.
        nonce: Of the request, by which PCP recognises its renewal and its end.
    """

    protocol: str
    grant: PortGrant
    nonce: bytes = b""

    @property
    def address(self) -> str:
        """The public host:port."""
        return join_address(self.grant.external_ip, self.grant.external_port)


@dataclass(frozen=True)
class HomeNetwork:
    """Where this machine is in its home.

    Attributes:
        own_ip: Its IPv4 address.
        router: The router's IPv4 address.
    """

    own_ip: str
    router: str


def find_home_network() -> HomeNetwork | None:
    """Return this machine's and its router's address; None without a private IPv4 address.

    A machine with a public address has no router to ask.
    """
    own_ip = read_default_sources().get(4)
    if own_ip is None or is_public_host(own_ip) or ipaddress.IPv4Address(own_ip).is_loopback:
        return None
    return HomeNetwork(own_ip, _read_default_gateway() or _guess_gateway(own_ip))


def _read_default_gateway() -> str:
    """Return the gateway of the default route on Linux; "" elsewhere."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in ROUTES.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1] == "00000000" and fields[2] != "00000000":
                return str(ipaddress.IPv4Address(int(fields[2], 16).to_bytes(4, "little")))
    return ""


def _guess_gateway(own_ip: str) -> str:
    """Return the first address of the home's network, which most routers have."""
    return str(ipaddress.ip_network(f"{own_ip}/24", strict=False)[1])


# ---- requests, which block ---------------------------------------------------------------------


def request_mapping(home: HomeNetwork, port: int, nonce: bytes) -> PortMapping | None:
    """Ask the router to forward a UDP port; None if no protocol succeeds.

    Args:
        home: Where this machine is.
        port: The UDP port.
        nonce: The same 12 random bytes in all requests for one mapping: by PCP nobody else may
            renew or end it (RFC 6887, section 11.3).
    """
    requests = {
        "PCP": partial(_request_pcp, home, port, nonce),
        "NAT-PMP": partial(_request_pmp, home, port),
        "UPnP": partial(_request_upnp, port),
    }
    for protocol, request in requests.items():
        try:
            return request()
        except (MessageError, OSError) as error:
            log.debug("no port mapping by %s: %s", protocol, error)
    return None


def release_mapping(home: HomeNetwork, port: int, mapping: PortMapping) -> None:
    """Tell the router that the port need not be forwarded any longer; do nothing if it is gone."""
    try:
        match mapping.protocol:
            case "PCP":
                _query(home.router, encode_pcp_map(home.own_ip, port, mapping.nonce, 0))
            case "NAT-PMP":
                _query(home.router, encode_pmp_map(port, 0))
            case _:
                _find_upnp().deleteportmapping(mapping.grant.external_port, "UDP")
    except Exception as error:  # miniupnpc raises `Exception` itself
        log.debug("the mapping was not released: %s", error)


def remove_iroh_mapping(port: int) -> int:
    """Remove what iroh's binding mapped to a port of this machine; return how many entries."""
    removed = 0
    try:
        router = _find_upnp()
        for external in _list_iroh_entries(router, port):
            router.deleteportmapping(external, "UDP")
            removed += 1
    except Exception as error:  # miniupnpc raises `Exception` itself
        log.debug("no mapping of iroh was removed: %s", error)
    return removed


def _list_iroh_entries(router: Any, port: int) -> list[int]:
    entries: list[int] = []
    for index in range(MAX_UPNP_ENTRIES):
        entry = router.getgenericportmapping(index)
        if entry is None:
            break
        external, protocol, (client, internal), description = entry[:4]
        is_ours = (client, internal) == (router.lanaddr, port)
        if protocol == "UDP" and is_ours and description == IROH_DESCRIPTION:
            entries.append(external)
    return entries


def _request_pcp(home: HomeNetwork, port: int, nonce: bytes) -> PortMapping:
    answer = _query(home.router, encode_pcp_map(home.own_ip, port, nonce, TIMES.lifetime_seconds))
    return PortMapping("PCP", decode_pcp_map(answer, port, nonce), nonce)


def _request_pmp(home: HomeNetwork, port: int) -> PortMapping:
    external_ip = decode_pmp_address(_query(home.router, encode_pmp_address()))
    grant = decode_pmp_map(_query(home.router, encode_pmp_map(port, TIMES.lifetime_seconds)), port)
    return PortMapping("NAT-PMP", PortGrant(external_ip, grant.external_port, grant.lifetime))


def _request_upnp(port: int) -> PortMapping:
    try:
        router = _find_upnp()
        external_ip = _read_external_ip(router)
        external = _add_upnp_entry(router, port)
    except Exception as error:  # miniupnpc raises `Exception` itself
        raise MessageError(f"UPnP: {error}") from None
    return PortMapping("UPnP", PortGrant(external_ip, external, TIMES.lifetime_seconds))


def _read_external_ip(router: Any) -> str:
    """Return the router's public address.

    Raises:
        MessageError: What the router states is not an address: "" while its line is down.
    """
    text = router.externalipaddress()
    try:
        return str(parse_ip(text))
    except ValueError:
        raise MessageError(f"the router states '{text[:50]}' as its public address") from None


def _add_upnp_entry(router: Any, port: int) -> int:
    """Map the same external port if it is free, else a neighbour; return which."""
    for external in range(port, min(port + 8, 65_536)):
        entry = router.getspecificportmapping(external, "UDP")
        is_ours = entry is not None and (entry[0], entry[1]) == (router.lanaddr, port)
        if entry is None or is_ours:
            lifetime = TIMES.lifetime_seconds
            router.addportmapping(external, "UDP", router.lanaddr, port, DESCRIPTION, "", lifetime)
            return external
    raise MessageError("the router has no free port near this one")


def _find_upnp() -> Any:
    """Return UPnP's router.

    Raises:
        Exception: There is none, or miniupnpc has no wheel for this system and Python.
    """
    import miniupnpc

    router = miniupnpc.UPnP()
    router.discoverdelay = TIMES.discovery_milliseconds
    router.discover()
    router.selectigd()
    return router


def _query(router: str, request: bytes) -> bytes:
    """Send a request to the router up to three times and return its answer.

    Raises:
        OSError: It does not answer.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        channel.connect((router, CONTROL_PORT))
        for seconds in TIMES.answer_seconds:
            channel.settimeout(seconds)
            channel.send(request)
            with contextlib.suppress(TimeoutError):
                return channel.recv(1100)
    raise OSError(f"{router} does not answer")


# ---- as long as the worker runs ----------------------------------------------------------------


class PortMapper:
    """Keep one port forwarded, and end that on exit."""

    def __init__(
        self,
        port: int,
        is_enabled: bool,
        find_site_view: Callable[[], str],
        on_mapped: Callable[[str], None],
        find_home: Callable[[], HomeNetwork | None] = find_home_network,
    ) -> None:
        """Map nothing yet; `run` does.

        Args:
            port: The UDP port; 0: none.
            is_enabled: Whether this machine's owner allows it.
            find_site_view: Returns the IP address from which the site sees this machine; "" while
                that is unknown.
            on_mapped: Receives the public host:port; "" once there is none.
            find_home: Returns where this machine is now; None without a router to ask.
        """
        self._find_home = find_home
        self._port = port
        self._is_enabled = is_enabled
        self._find_site_view = find_site_view
        self._on_mapped = on_mapped
        self._home: HomeNetwork | None = None
        self._mapping: PortMapping | None = None
        self._nonce = secrets.token_bytes(PCP_NONCE_BYTES)

    async def run(self) -> None:
        """Map the port, renew that, and do it again in another network, until cancelled."""
        if not self._port or not await self._is_useful():
            await asyncio.Event().wait()
        await asyncio.sleep(TIMES.iroh_seconds)
        while True:
            self._home = self._find_home()
            if self._home is not None:
                await asyncio.to_thread(remove_iroh_mapping, self._port)
                if self._is_enabled:
                    mapping = await asyncio.to_thread(
                        request_mapping, self._home, self._port, self._nonce
                    )
                    self._adopt(mapping)
            if await self._network_changes(self._renewal_seconds()):
                self._adopt(None)  # what the router of the network before forwards leads nowhere

    async def _network_changes(self, seconds: float) -> bool:
        """Wait for so many seconds at most; return whether this machine came to another network."""
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            await asyncio.sleep(min(seconds, TIMES.network_seconds))
            if self._find_home() != self._home:
                return True
        return False

    async def _is_useful(self) -> bool:
        """Return whether the site sees a public address, or nobody knows what it sees."""
        began_at = time.monotonic()
        while not self._find_site_view() and time.monotonic() < began_at + TIMES.site_seconds:
            await asyncio.sleep(1.0)
        view = self._find_site_view()
        return not view or is_public_host(view)

    def _adopt(self, mapping: PortMapping | None) -> None:
        previous = self._mapping.address if self._mapping else ""
        self._mapping = mapping
        address = mapping.address if mapping else ""
        if mapping is not None and not is_public_host(mapping.grant.external_ip):
            log.info(
                "the router forwards a port, but has the private address %s itself: another router "
                "lies between it and the internet",
                mapping.grant.external_ip,
            )
            address = ""
        elif mapping is not None and address != previous:
            log.info("the router forwards %s to this machine (%s)", address, mapping.protocol)
        self._on_mapped(address)

    def _renewal_seconds(self) -> float:
        if self._mapping is None:
            return TIMES.retry_seconds
        lifetime = min(TIMES.lifetime_seconds, self._mapping.grant.lifetime)
        return max(TIMES.renewal_seconds, lifetime / 2)

    async def close(self) -> None:
        """End the mapping; wait a few seconds at most for the router."""
        home, mapping = self._home, self._mapping
        self._mapping = None
        if home is None or mapping is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMES.release_seconds):
                await asyncio.to_thread(release_mapping, home, self._port, mapping)
