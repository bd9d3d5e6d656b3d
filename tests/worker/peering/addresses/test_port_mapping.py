"""Test requests for a port to a router: their bytes, and against a router on a local address."""

import asyncio
import socket
import struct

import pytest
from helpers.network.routers import PcpMappings, Router, pcp_answer
from helpers.wait_for import wait_until

from barnraise.errors import MessageError
from barnraise.peering.addresses import nat_pmp, port_mapping
from barnraise.peering.addresses.port_mapping import (
    HomeNetwork,
    PortMapper,
    PortMapping,
    PortMappingTimes,
    release_mapping,
    request_mapping,
)

PORT = 45555
NONCE = b"n" * 12


def pmp_answer(request: bytes, result: int = 0) -> bytes:
    """Answer as RFC 6886 (sections 3.2 and 3.3) says."""
    if request == b"\0\0":
        return struct.pack("!BBHI", 0, 128, result, 7) + socket.inet_aton("5.9.1.1")
    internal, external, lifetime = struct.unpack("!HHI", request[4:])
    return struct.pack("!BBHIHHI", 0, 129, result, 7, internal, external + 1, lifetime)


def test_pcp_request_has_the_layout_of_the_standard() -> None:
    request = nat_pmp.encode_pcp_map("192.168.1.50", PORT, NONCE, 3600)
    assert len(request) == 60
    assert request[:8] == bytes([2, 1, 0, 0]) + struct.pack("!I", 3600)
    assert request[8:24] == bytes(10) + b"\xff\xff" + bytes([192, 168, 1, 50])
    assert request[24:36] == NONCE
    assert request[36:44] == bytes([17, 0, 0, 0]) + struct.pack("!HH", PORT, PORT)


def test_pcp_answer_is_read_and_compared_with_the_request() -> None:
    request = nat_pmp.encode_pcp_map("192.168.1.50", PORT, NONCE, 3600)
    grant = nat_pmp.decode_pcp_map(pcp_answer(request), PORT, NONCE)
    assert (grant.external_ip, grant.external_port, grant.lifetime) == ("5.9.1.1", 50_000, 3600)
    for answer, port, nonce in (
        (pcp_answer(request, result=2), PORT, NONCE),
        (pcp_answer(request), PORT + 1, NONCE),
        (pcp_answer(request), PORT, b"o" * 12),
        (pcp_answer(request)[:40], PORT, NONCE),
        (b"", PORT, NONCE),
        (bytes(60), PORT, NONCE),
    ):
        with pytest.raises(MessageError):
            nat_pmp.decode_pcp_map(answer, port, nonce)


def test_nat_pmp_answers_are_read_and_compared_with_the_request() -> None:
    request = nat_pmp.encode_pmp_map(PORT, 3600)
    assert request == struct.pack("!BBHHHI", 0, 1, 0, PORT, PORT, 3600)
    grant = nat_pmp.decode_pmp_map(pmp_answer(request), PORT)
    assert (grant.external_port, grant.lifetime) == (PORT + 1, 3600)
    assert nat_pmp.decode_pmp_address(pmp_answer(b"\0\0")) == "5.9.1.1"
    for answer in (pmp_answer(request, result=3), pmp_answer(request)[:9], bytes(16)):
        with pytest.raises(MessageError):
            nat_pmp.decode_pmp_map(answer, PORT)
    for answer in (pmp_answer(b"\0\0", result=2), b"\0", bytes(12)):
        with pytest.raises(MessageError):
            nat_pmp.decode_pmp_address(answer)


def test_router_with_pcp_is_asked_once_and_released() -> None:
    mappings = PcpMappings()
    router = Router(mappings.answer)
    home = HomeNetwork("127.0.0.1", router.ip)
    mapping = request_mapping(home, PORT, NONCE)
    assert mapping is not None
    assert (mapping.protocol, mapping.address) == ("PCP", "5.9.1.1:50000")
    release_mapping(home, PORT, mapping)
    assert not mappings.nonces and mappings.results == [0, 0]
    first, last = router.requests
    assert first[24:36] == last[24:36], "the same nonce ends the mapping"
    assert last[4:8] == bytes(4)


def test_mapping_is_renewed_and_ended_with_one_nonce(monkeypatch) -> None:
    def find_no_router() -> None:
        raise OSError("there is no UPnP here")

    times = PortMappingTimes(iroh_seconds=0.0, renewal_seconds=0.01)
    monkeypatch.setattr(port_mapping, "TIMES", times)
    monkeypatch.setattr("miniupnpc.UPnP", find_no_router)
    mappings = PcpMappings(lifetime=0)
    home = HomeNetwork("127.0.0.1", Router(mappings.answer).ip)

    async def renew() -> None:
        mapped: list[str] = []
        mapper = PortMapper(PORT, True, lambda: "5.9.1.1", mapped.append, lambda: home)
        running = asyncio.create_task(mapper.run())
        async with asyncio.timeout(60):
            while len(mapped) < 3:
                await asyncio.sleep(0.01)
        running.cancel()
        assert mapped == ["5.9.1.1:50000"] * len(mapped)
        await mapper.close()

    asyncio.run(renew())
    assert mappings.ended == 1 and not any(mappings.results)


def test_router_without_pcp_is_asked_by_nat_pmp() -> None:
    def answer(request: bytes) -> bytes:
        is_pcp = request[0] == 2
        return bytes([0, 129, 0, 1]) + bytes(4) if is_pcp else pmp_answer(request)

    router = Router(answer)
    home = HomeNetwork("127.0.0.1", router.ip)
    mapping = request_mapping(home, PORT, NONCE)
    assert isinstance(mapping, PortMapping)
    assert (mapping.protocol, mapping.address) == ("NAT-PMP", f"5.9.1.1:{PORT + 1}")
    release_mapping(home, PORT, mapping)
    assert router.requests[-1] == struct.pack("!BBHHHI", 0, 1, 0, PORT, 0, 0)


class UpnpRouter:
    """A router that answers by UPnP, and states a public address of one's choice."""

    def __init__(self, external_ip: str) -> None:
        self.lanaddr = "127.0.0.1"
        self.mapped: list[int] = []
        self._external_ip = external_ip

    def discover(self) -> int:
        return 1

    def selectigd(self) -> str:
        return "http://127.0.0.1/"

    def externalipaddress(self) -> str:
        return self._external_ip

    def getspecificportmapping(self, external: int, protocol: str) -> None:
        return None

    def addportmapping(self, external: int, *arguments: object) -> bool:
        self.mapped.append(external)
        return True


@pytest.mark.parametrize(
    ("stated", "address"),
    [("5.9.1.1", f"5.9.1.1:{PORT}"), ("", None), ("(none)", None), ("5.9.1.1\n", None)],
)
def test_upnp_router_that_states_no_address_maps_nothing(monkeypatch, stated, address) -> None:
    router = UpnpRouter(stated)
    monkeypatch.setattr("miniupnpc.UPnP", lambda: router)
    silent = HomeNetwork("127.0.0.1", "127.255.255.254")  # by PCP and NAT-PMP
    mapping = request_mapping(silent, PORT, NONCE)
    assert (mapping and mapping.address) == address
    assert router.mapped == ([PORT] if address else [])


@pytest.mark.slow  # because UPnP's search for a router takes seconds
def test_laptop_in_another_network_asks_the_router_there(monkeypatch) -> None:
    times = PortMappingTimes(iroh_seconds=0.0, network_seconds=0.05, discovery_milliseconds=10)
    monkeypatch.setattr(port_mapping, "TIMES", times)
    routers = [Router(PcpMappings().answer), Router(PcpMappings("5.9.1.2").answer)]
    homes: list[HomeNetwork | None] = [HomeNetwork("127.0.0.1", routers[0].ip)]
    mapped: list[str] = []

    async def travel() -> None:
        mapper = PortMapper(PORT, True, lambda: "5.9.1.1", mapped.append, lambda: homes[-1])
        running = asyncio.create_task(mapper.run())
        for home, expected in (
            (homes[0], ["5.9.1.1:50000"]),
            (None, [""]),  # on a line with a public address
            (HomeNetwork("127.0.0.1", routers[1].ip), ["", "5.9.1.2:50000"]),
        ):
            mapped.clear()
            homes.append(home)
            async with asyncio.timeout(60):
                while mapped != expected:
                    await asyncio.sleep(0.05)
        running.cancel()
        await mapper.close()

    asyncio.run(travel())
    wait_until(lambda: routers[1].requests[-1][4:8] == bytes(4), 60)  # it was released
