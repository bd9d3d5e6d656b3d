"""Classify how the internet sees a machine: directly, or through which kind of NAT. Pure.

RFC 4787 (section 4.1) distinguishes NATs by what they map: one that maps a socket to the same
public port whatever the destination ("endpoint-independent mapping") lets two peers connect to each
other, once both dial at one time. One that chooses another port for each destination ("symmetric")
does not, because no peer can know the port that another peer will see.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from barnraise.peering.addresses.addresses import host_of, port_of
from barnraise.protocol.ip_addresses import is_public_host, is_public_ip, parse_ip


class NatKind(Enum):
    """What lies between a machine's socket and the peers that see it."""

    UNKNOWN = "unknown"  # fewer than two peers report an address
    NONE = "none"  # a peer sees one of the machine's own addresses
    SAME_PORT = "same_port"  # all peers see one address: peers can be dialled through the NAT
    DIFFERENT_PORT = "different_port"  # each peer sees another port: a symmetric NAT


@dataclass(frozen=True)
class Observation:
    """The address at which one peer sees this machine.

    Attributes:
        reporter: The peer's key.
        volunteer: Digest of the peer's volunteer.
        address: host:port.
    """

    reporter: str
    volunteer: str
    address: str


@dataclass(frozen=True)
class DialBack:
    """Whether a peer that was asked to dial this machine, or to have it dialled, reached it.

    Attributes:
        reporter: The key of the peer that was asked.
        host: This machine's address as that peer sees it.
        is_reached: Whether this machine was reached.
        by_stranger: Whether a peer dialled that this machine had not dialled before. A router may
            let others in, from another port, only because this machine has dialled their address.
    """

    reporter: str
    host: str
    is_reached: bool
    by_stranger: bool


class DialBackVerdict(Enum):
    """What dial-backs have shown."""

    REACHED = "reached"
    NOT_REACHED = "not_reached"
    UNTESTED = "untested"  # nobody could be asked, or nobody answered


@dataclass(frozen=True)
class ReachFacts:
    """What a machine knows of how it can be reached.

    Attributes:
        local_addresses: host:port of its own sockets.
        observations: What connected peers see.
        is_reached: Whether a peer that this machine had not dialled has connected to it; None while
            nobody can have tried.
        mapped_address: host:port that the router maps to this machine; "" without a mapping.
        announced_addresses: host:port that its owner announces.
        dial_backs: What became of the peers' attempts to reach it, one for each peer.
    """

    local_addresses: tuple[str, ...] = ()
    observations: tuple[Observation, ...] = ()
    is_reached: bool | None = None
    mapped_address: str = ""
    announced_addresses: tuple[str, ...] = ()
    dial_backs: tuple[DialBack, ...] = ()


def classify_nat(facts: ReachFacts, version: int = 4) -> NatKind:
    """Classify the NAT between a machine and its peers, by 4 or 6, the version of IP."""
    seen = _widest_scope(facts.observations, version)
    local = set(facts.local_addresses)
    if any(observation.address in local for observation in seen):
        return NatKind.NONE
    if len({observation.reporter for observation in seen}) < 2:
        return NatKind.UNKNOWN
    is_same = len({observation.address for observation in seen}) == 1
    return NatKind.SAME_PORT if is_same else NatKind.DIFFERENT_PORT


def judge_dial_backs(facts: ReachFacts) -> tuple[DialBackVerdict, int]:
    """Judge whether peers reach a machine by those that tried.

    What strangers found counts more than what others did; public addresses count more than those
    of a home's own network, and IPv4 more than IPv6.

    Returns:
        The verdict, and by how many peers' reports.
    """
    counted = list(facts.dial_backs)
    counted = [tried for tried in counted if is_public_host(tried.host)] or counted
    counted = [tried for tried in counted if ":" not in tried.host] or counted
    counted = [tried for tried in counted if tried.by_stranger] or counted
    if not counted:
        return DialBackVerdict.UNTESTED, 0
    reached = sum(tried.is_reached for tried in counted)
    if reached:
        return DialBackVerdict.REACHED, reached
    return DialBackVerdict.NOT_REACHED, len(counted)


def describe_nat(facts: ReachFacts) -> str:
    """Return one sentence about how this machine can be reached; "" while that is unknown."""
    kinds = {version: classify_nat(facts, version) for version in (4, 6)}
    if facts.is_reached:
        return "Peers reach this machine directly."
    port = next((port_of(address) for address in facts.local_addresses), 0)
    is_shut = judge_dial_backs(facts)[0] is DialBackVerdict.NOT_REACHED
    if NatKind.NONE in kinds.values() and is_shut:
        return (
            "This machine has an address of its own, but peers that dial it do not get in: allow "
            f"incoming UDP {port} in the firewall of this machine and network."
        )
    if NatKind.NONE in kinds.values():
        return "This machine has an address of its own; no peer has dialled it yet."
    if facts.mapped_address:
        return f"The router maps {facts.mapped_address} to this machine."
    if NatKind.SAME_PORT in kinds.values():
        return (
            "This machine is behind a router that uses one port for all peers: peers connect to it "
            "when both sides dial at one time."
        )
    if NatKind.DIFFERENT_PORT in kinds.values():
        return (
            "This machine is behind a router that uses another port for each peer (a symmetric "
            "NAT): peers behind routers cannot connect to it. Forward "
            f"UDP port {port} in the router and join with --port {port}, or allow port mapping in "
            "the router."
        )
    return ""


def _widest_scope(observations: Iterable[Observation], version: int) -> Sequence[Observation]:
    """Return the observations of public addresses; if there are none, those of private ones.

    A peer in the same home sees the address there, which tells nothing of the router.
    """
    public: list[Observation] = []
    private: list[Observation] = []
    for observation in observations:
        try:
            address = parse_ip(host_of(observation.address))
        except ValueError:
            continue
        if address.version == version:
            (public if is_public_ip(address) else private).append(observation)
    return public or private
