"""Know how others reach this machine: which addresses to announce, and what proves them. Pure."""

from collections.abc import Callable, Sequence

from barnraise.peering.addresses.addresses import host_of, parse_address, port_of, version_of
from barnraise.peering.addresses.nat_type import DialBack, ReachFacts
from barnraise.peering.addresses.observed_addresses import ObservedAddresses
from barnraise.protocol.ip_addresses import is_public_host
from barnraise.protocol.messages import MAX_DIALLED_BACK
from barnraise.protocol.table_sizes import SOME, store_newest
from barnraise.protocol.types import MAX_ADDRESSES

# Seconds after a dial in which a router lets the dialled host answer. Most forget in two minutes.
OPENED_SECONDS = 300.0
MAX_DIAL_BACKS = 8  # the newest
# For which a dial-back or an unexpected connection shows whether this machine is reachable.
EVIDENCE_SECONDS = 3600.0


class Reachability:
    """Collect this machine's addresses from all sources.

    One thread records; any thread may ask.

    Attributes:
        observed: What peers and the site report.
    """

    def __init__(self, list_local: Callable[[], list[str]], announced: Sequence[str] = ()) -> None:
        """Know the machine's own addresses.

        Args:
            list_local: Returns host:port of its own sockets, the most useful first.
            announced: host:port that its owner announces, with IP addresses.
        """
        self.observed = ObservedAddresses()
        self._list_local = list_local
        self._announced: tuple[str, ...] = ()
        self._mapped = ""
        self._dialled_hosts: dict[str, float] = {}
        self._reached_at: float | None = None
        self._dial_backs: dict[str, tuple[float, DialBack]] = {}  # by reporter
        self.set_announced(announced)

    def set_announced(self, addresses: Sequence[str]) -> None:
        """Replace what the owner announces; a forwarded name may have another address now."""
        parsed = [parse_address(address) for address in addresses]
        self._announced = tuple(dict.fromkeys(address for address in parsed if address))

    def set_mapped(self, address: str) -> None:
        """Set the host:port that the router maps to this machine; "" without a mapping."""
        self._mapped = parse_address(address) or ""

    def on_dial(self, addresses: Sequence[str], now: float) -> None:
        """Record that this machine dials: its router lets these hosts answer for a while."""
        for address in addresses:
            store_newest(self._dialled_hosts, host_of(address), now, SOME)

    def on_accepted(self, address: str, now: float) -> None:
        """Record that a peer has connected to this machine from an address.

        A connection from the internet proves that this machine is reachable, unless it had dialled
        that host before.
        """
        host = host_of(address)
        dialled_at = self._dialled_hosts.get(host)
        if is_public_host(host) and (dialled_at is None or now >= dialled_at + OPENED_SECONDS):
            self._reached_at = now

    def on_dial_back(self, outcome: DialBack, now: float) -> None:
        """Record what became of a peer's attempt to reach this machine."""
        store_newest(self._dial_backs, outcome.reporter, (now, outcome), MAX_DIAL_BACKS)
        if outcome.is_reached and outcome.by_stranger and is_public_host(outcome.host):
            self._reached_at = now

    def forget_dial_backs(self) -> None:
        """Drop what was found, because this machine has other addresses now."""
        self._dial_backs.clear()
        self._reached_at = None

    def list_ports(self, seen_at: str) -> list[int]:
        """Return the UDP ports at which a peer may reach this machine, the likeliest first.

        The peer sees it at the host:port `seen_at`; "" if it does not state that.
        """
        if not seen_at:  # both are on one machine or cable
            first = {version_of(address): port_of(address) for address in self._list_local()[::-1]}
            return list(dict.fromkeys(first.values()))[:MAX_DIALLED_BACK]
        stated = [*self._announced, *([self._mapped] if self._mapped else [])]
        at_host = [address for address in stated if host_of(address) == host_of(seen_at)]
        own = [a for a in self._list_local() if version_of(a) == version_of(seen_at)]
        ports = [port_of(address) for address in (*at_host, *own[:1], seen_at)]
        return [port for port in dict.fromkeys(ports) if port][:MAX_DIALLED_BACK]

    def list_addresses(self, now: float) -> list[str]:
        """Return the host:port pairs to announce, at most 16, those that work for most first."""
        local = self._list_local()
        mapped = [self._mapped] if self._mapped else []
        confirmed = self.observed.confirmed(now, local)
        # The first of its own addresses serves peers in the same home.
        addresses = [*self._announced, *mapped, *local[:1], *confirmed, *local[1:]]
        return list(dict.fromkeys(addresses))[:MAX_ADDRESSES]

    def list_candidates(self, now: float) -> list[str]:
        """Return the addresses at which a single peer may try to reach this machine now.

        What one peer alone reports is among them: a common peer sees the very port through which
        another peer gets in.
        """
        seen = [observation.address for observation in self.observed.observations(now)]
        addresses = [*self._announced, *reversed(seen), *self.list_addresses(now)]
        return list(dict.fromkeys(addresses))[:MAX_ADDRESSES]

    def facts(self, now: float) -> ReachFacts:
        """Return what is known, for `classify_nat`."""
        is_reached = self._reached_at is not None and now < self._reached_at + EVIDENCE_SECONDS
        return ReachFacts(
            local_addresses=tuple(self._list_local()),
            observations=self.observed.observations(now),
            is_reached=is_reached or None,
            mapped_address=self._mapped,
            announced_addresses=self._announced,
            dial_backs=tuple(
                outcome
                for at, outcome in list(self._dial_backs.values())
                if now < at + EVIDENCE_SECONDS
            ),
        )
