"""Encode and decode requests to a router for a port: PCP (RFC 6887) and NAT-PMP (RFC 6886). Pure.

Both speak over UDP to port 5351 of the router. NAT-PMP is the older one, for IPv4 only.
"""

import ipaddress
import struct
from dataclasses import dataclass

from barnraise.errors import MessageError

CONTROL_PORT = 5351
UDP = 17  # the protocol's number
PCP_VERSION = 2
PCP_MAP = 1
NAT_PMP_MAP_UDP = 1
RESPONSE = 128  # is added to the operation in an answer
PCP_NONCE_BYTES = 12
_PCP_HEADER = struct.Struct("!BBHI16s")
_PCP_MAP = struct.Struct("!12sB3xHH16s")
_PCP_ANSWER = struct.Struct("!BBxBII12x")
_PMP_MAP = struct.Struct("!BBHHHI")
_PMP_MAP_ANSWER = struct.Struct("!BBHIHHI")
_PMP_ADDRESS_ANSWER = struct.Struct("!BBHI4s")


@dataclass(frozen=True)
class PortGrant:
    """A router's answer.

    Attributes:
        external_ip: Its public address; "" where the answer does not contain it.
        external_port: The port that it forwards.
        lifetime: Seconds for which it does.
    """

    external_ip: str
    external_port: int
    lifetime: int


def encode_pcp_map(client_ip: str, port: int, nonce: bytes, lifetime: int) -> bytes:
    """Encode a request to forward a UDP port; a lifetime of 0 seconds ends that."""
    client = ipaddress.IPv6Address(f"::ffff:{client_ip}").packed
    any_address = ipaddress.IPv6Address("::ffff:0.0.0.0").packed
    header = _PCP_HEADER.pack(PCP_VERSION, PCP_MAP, 0, lifetime, client)
    return header + _PCP_MAP.pack(nonce, UDP, port, port, any_address)


def decode_pcp_map(answer: bytes, port: int, nonce: bytes) -> PortGrant:
    """Decode a router's answer to `encode_pcp_map`.

    Raises:
        MessageError: It is no such answer, or a refusal.
    """
    if len(answer) < _PCP_ANSWER.size + _PCP_MAP.size:
        raise MessageError("the router does not speak PCP")
    version, operation, result, lifetime, _ = _PCP_ANSWER.unpack_from(answer)
    echo, protocol, internal, external, ip = _PCP_MAP.unpack_from(answer, _PCP_ANSWER.size)
    if (version, operation) != (PCP_VERSION, PCP_MAP | RESPONSE):
        raise MessageError("the router does not speak PCP")
    if result:
        raise MessageError(f"the router refuses with PCP's result {result}")
    if (echo, protocol, internal) != (nonce, UDP, port):
        raise MessageError("the router's answer is to another request")
    address = ipaddress.IPv6Address(ip)
    return PortGrant(str(address.ipv4_mapped or address), external, lifetime)


def encode_pmp_map(port: int, lifetime: int) -> bytes:
    """Encode a request to forward a UDP port; a lifetime of 0 seconds ends that."""
    return _PMP_MAP.pack(0, NAT_PMP_MAP_UDP, 0, port, port if lifetime else 0, lifetime)


def decode_pmp_map(answer: bytes, port: int) -> PortGrant:
    """Decode a router's answer to `encode_pmp_map`; it does not contain the router's address.

    Raises:
        MessageError: It is no such answer, or a refusal.
    """
    if len(answer) < _PMP_MAP_ANSWER.size:
        raise MessageError("the router does not speak NAT-PMP")
    version, operation, result, _, internal, external, lifetime = _PMP_MAP_ANSWER.unpack_from(
        answer
    )
    if (version, operation, internal) != (0, NAT_PMP_MAP_UDP | RESPONSE, port):
        raise MessageError("the router does not speak NAT-PMP")
    if result:
        raise MessageError(f"the router refuses with NAT-PMP's result {result}")
    return PortGrant("", external, lifetime)


def encode_pmp_address() -> bytes:
    """Encode a request for the router's public address."""
    return bytes([0, 0])


def decode_pmp_address(answer: bytes) -> str:
    """Decode a router's answer to `encode_pmp_address`.

    Raises:
        MessageError: It is no such answer, or a refusal.
    """
    if len(answer) < _PMP_ADDRESS_ANSWER.size:
        raise MessageError("the router does not speak NAT-PMP")
    version, operation, result, _, ip = _PMP_ADDRESS_ANSWER.unpack_from(answer)
    if (version, operation, result) != (0, RESPONSE, 0):
        raise MessageError("the router does not state its address by NAT-PMP")
    return str(ipaddress.IPv4Address(ip))
