"""Judge how peers can reach a machine, from facts. Pure."""

from dataclasses import dataclass, field
from enum import Enum

from barnraise.peering.addresses.addresses import host_of, port_of
from barnraise.peering.addresses.nat_type import (
    DialBackVerdict,
    NatKind,
    ReachFacts,
    classify_nat,
    judge_dial_backs,
)
from barnraise.peering.links.bandwidth_meter import LineRates
from barnraise.protocol.ip_addresses import is_inner_host

MIN_SILENT_PEERS = 2  # which do not answer, before it is this machine's UDP that is suspected


class ReachVerdict(Enum):
    """How peers can reach a machine."""

    PUBLIC = "public"  # at an address of its own
    FIREWALL = "firewall"  # it has an address of its own, where a firewall lets nobody in
    FORWARDED = "forwarded"  # at a port that its router forwards
    NAT = "nat"  # behind a router: when both sides dial at one time
    DOUBLE_NAT = "double_nat"  # behind two routers
    SYMMETRIC_NAT = "symmetric_nat"  # behind a router that uses another port for each peer
    UDP_BLOCKED = "udp_blocked"  # HTTP works, and none of several peers answers by UDP
    PEER_SILENT = "peer_silent"  # the only peer that was dialled does not answer: it may be offline
    IPV6_ONLY = "ipv6_only"  # no peer that has only IPv4 can be reached
    NO_NETWORK = "no_network"
    UNKNOWN = "unknown"  # nobody could be asked


@dataclass(frozen=True)
class NetworkFacts:
    """What a machine knows of its connection to the internet."""

    has_ipv4: bool = True  # whether it has an IPv4 address with a route beyond its own machine
    has_ipv6: bool = False  # whether it has a global IPv6 address with a route
    is_site_reachable: bool = True  # by HTTP
    has_asked_peers: bool = False
    peers_tried: int = 0  # that were dialled by UDP
    peers_connected: int = 0  # of those
    hops: tuple[str, ...] = ()  # the first routers, the nearest first; "" for one that is silent
    lan_address: str = ""  # this machine's own address in its network
    port: int = 0  # the UDP port for peers; 0 for any
    has_port_mapping: bool = True  # whether this machine asks its router to forward the port
    reach: ReachFacts = field(default_factory=ReachFacts)
    line: LineRates = field(default_factory=LineRates)  # to and from a peer, as the two measured


def judge_reach(facts: NetworkFacts) -> ReachVerdict:
    """Return how peers can reach a machine."""
    if not facts.has_ipv4 and not facts.has_ipv6:
        return ReachVerdict.NO_NETWORK
    if facts.peers_tried and not facts.peers_connected:
        if not facts.is_site_reachable:
            return ReachVerdict.NO_NETWORK
        # A site lists a peer for a while after it has gone offline, but hardly several at a time.
        is_evidence = facts.peers_tried >= MIN_SILENT_PEERS
        return ReachVerdict.UDP_BLOCKED if is_evidence else ReachVerdict.PEER_SILENT
    if not facts.has_ipv4:
        return ReachVerdict.IPV6_ONLY
    nat = classify_nat(facts.reach, 4)
    dialled_back, _ = judge_dial_backs(facts.reach)
    is_shut = dialled_back is DialBackVerdict.NOT_REACHED and not facts.reach.is_reached
    if nat is NatKind.NONE:
        return ReachVerdict.FIREWALL if is_shut else ReachVerdict.PUBLIC
    is_reached = facts.reach.is_reached or dialled_back is DialBackVerdict.REACHED
    if is_reached or (_has_public_mapping(facts) and not is_shut):
        return ReachVerdict.FORWARDED
    if nat is NatKind.DIFFERENT_PORT:
        return ReachVerdict.SYMMETRIC_NAT
    if is_behind_two_routers(facts):
        return ReachVerdict.DOUBLE_NAT
    return ReachVerdict.NAT if nat is NatKind.SAME_PORT else ReachVerdict.UNKNOWN


def _has_public_mapping(facts: NetworkFacts) -> bool:
    """Return whether peers see the very port that is forwarded.

    The mapping of the inner of two routers, or an announced port that nobody forwards, leads
    nowhere.
    """
    claimed = [facts.reach.mapped_address, *facts.reach.announced_addresses]
    seen = {observation.address for observation in facts.reach.observations}
    return any(address in seen for address in claimed if address)


def is_behind_two_routers(facts: NetworkFacts) -> bool:
    """Return whether the router is itself behind another one: its outer address is not public.

    The router states that address when it maps a port, or the second hop has one of a private
    network or of a provider that lets many customers share an address (100.64.0.0/10).
    """
    mapped = facts.reach.mapped_address
    stated = host_of(mapped) if mapped else ""
    if stated and is_inner_host(stated):
        return True
    observed = {host_of(seen.address) for seen in facts.reach.observations}
    public = {host for host in observed if not is_inner_host(host) and ":" not in host}
    if stated and public and stated not in public:
        return True
    return len(facts.hops) > 1 and all(hop and is_inner_host(hop) for hop in facts.hops[:2])


def describe_reach(facts: NetworkFacts) -> str:
    """Return one sentence on how peers reach a machine; for a problem, with the exact remedy."""
    port = facts.port or next(map(port_of, facts.reach.local_addresses), 0)
    shown_port = f"UDP {port}" if port else "a UDP port"
    fixed = f" --port {port}" if port else " --port PORT"
    machine = f" for {facts.lan_address}" if facts.lan_address else ""
    forward = f"open {shown_port} in your router{machine} and join with{fixed}"
    sentences = {
        ReachVerdict.PUBLIC: "Peers reach this machine directly, at an address of its own.",
        ReachVerdict.FIREWALL: "This machine has an address of its own, but no peer gets in: allow "
        f"incoming {shown_port} in the firewall of this machine and network, and join with{fixed}.",
        ReachVerdict.FORWARDED: "Peers reach this machine directly, at a port that its router "
        "forwards.",
        ReachVerdict.NAT: "This machine is behind a router: peers connect to it when both sides "
        "dial at one time. For direct connections "
        + (
            "allow port mapping (UPnP) in the router, or "
            if facts.has_port_mapping
            else "join with --port-mapping, or "
        )
        + f"{forward}.",
        ReachVerdict.DOUBLE_NAT: "This machine is behind two routers: a port that is opened in the "
        f"inner one alone leads nowhere. Open {shown_port} in both, or let the outer one work as a "
        f"bridge and {forward}; if the outer one is your provider's, ask for a public address.",
        ReachVerdict.SYMMETRIC_NAT: "This machine is behind a router that uses another port for "
        "each peer (a symmetric NAT), so peers behind routers cannot connect to it: "
        f"{forward}, or allow port mapping (UPnP) in the router.",
        ReachVerdict.UDP_BLOCKED: f"The site answers, but none of the {facts.peers_tried} peers "
        "that it lists does by UDP: allow outgoing UDP to all ports in the firewall of this "
        "machine and network, or use another network. If all of them have just gone offline, run "
        "`barnraise doctor RUN` again later.",
        ReachVerdict.PEER_SILENT: "The only peer that the site lists does not answer by UDP: it "
        "is offline, or a firewall blocks outgoing UDP. Run `barnraise doctor RUN` again while "
        "more machines train in the run.",
        ReachVerdict.IPV6_ONLY: "This machine has only IPv6: it reaches peers that have it, and no "
        "others. For all peers, turn IPv4 on in the router or ask the provider for it.",
        ReachVerdict.NO_NETWORK: "This machine has no way to the internet: it trains with "
        "machines of its own network alone. For others connect it, or check the cable, the Wi-Fi "
        "and the router.",
        ReachVerdict.UNKNOWN: "Nobody has told this machine yet how it is seen from outside: run "
        "`barnraise doctor RUN` while other machines train in the run.",
    }
    return sentences[judge_reach(facts)]


def describe_dial_backs(facts: NetworkFacts) -> str:
    """Return one sentence on whether peers that were asked have reached a machine."""
    verdict, count = judge_dial_backs(facts.reach)
    if verdict is DialBackVerdict.REACHED:
        return "A peer reached this machine when it was asked to dial it."
    if verdict is DialBackVerdict.NOT_REACHED:
        return (
            f"No peer could reach this machine (tried by {count}): a connection needs that this "
            "machine dials, too."
        )
    if facts.peers_connected:
        return (
            "Whether peers reach this machine could not be tested: those that are online did not "
            "try. Run `barnraise doctor RUN` again in a few minutes."
        )
    return f"Whether peers reach this machine could not be tested: {describe_absence(facts)}."


def describe_absence(facts: NetworkFacts) -> str:
    """Return why there is no connection to a peer, as the end of a sentence."""
    if facts.peers_tried:
        return "no peer that the site lists answered"
    return "nobody else is online"
