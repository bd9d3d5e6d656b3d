"""Collect at which addresses others see this machine, and decide which of them to believe. Pure.

A machine behind a router cannot see its public address; its peers and the site can. One of them
alone may lie: then this machine would announce a victim's address as its own. So an address counts
once peers of two volunteers report it, or one peer reports it and the site saw its host.
"""

import math
from collections.abc import Iterable

from barnraise.peering.addresses.addresses import host_of, parse_address
from barnraise.peering.addresses.nat_type import Observation
from barnraise.protocol.ip_addresses import parse_ip
from barnraise.protocol.table_sizes import store_newest

MAX_OBSERVATIONS = 64  # of peers, the newest
OBSERVATION_SECONDS = 120.0  # for which the report of a peer counts that is no longer connected


class ObservedAddresses:
    """What peers and the site report of this machine's address.

    One thread records; any thread may ask.
    """

    def __init__(self) -> None:
        # By reporter, the newest last: what it reports, and when its connection ended or inf.
        self._reports: dict[str, tuple[Observation, float]] = {}
        self._site_hosts: dict[int, str] = {}  # by version of IP

    def on_report(self, reporter: str, volunteer: str, address: str) -> None:
        """Record at which host:port a connected peer, of a key and volunteer, sees this machine.

        Anything else than host:port is ignored.
        """
        parsed = parse_address(address)
        if parsed is None:
            return
        report = Observation(reporter, volunteer or reporter, parsed), math.inf
        store_newest(self._reports, reporter, report, MAX_OBSERVATIONS)

    def on_disconnected(self, reporter: str, now: float) -> None:
        """Record that a peer's connection has ended at a time in seconds."""
        if reporter in self._reports:
            self._reports[reporter] = self._reports[reporter][0], now

    def on_site_report(self, host: str) -> None:
        """Record from which IP address the site receives this machine's requests."""
        try:
            ip = parse_ip(host)
        except ValueError:
            return
        if not ip.is_unspecified:
            self._site_hosts[ip.version] = str(ip)

    def site_view(self) -> str:
        """Return the IPv4 address from which the site sees this machine, else IPv6, else ""."""
        return self._site_hosts.get(4) or self._site_hosts.get(6, "")

    def observations(self, now: float) -> tuple[Observation, ...]:
        """Return the reports that count at a time in seconds, the oldest first."""
        return tuple(
            observation
            for observation, left_at in list(self._reports.values())
            if now < left_at + OBSERVATION_SECONDS
        )

    def confirmed(self, now: float, own_addresses: Iterable[str] = ()) -> list[str]:
        """Return the addresses at which enough others report this machine, besides its own."""
        volunteers: dict[str, set[str]] = {}
        for observation in self.observations(now):
            volunteers.setdefault(observation.address, set()).add(observation.volunteer)
        known = set(own_addresses)
        return [
            address
            for address, reporters in volunteers.items()
            if address not in known
            and (len(reporters) >= 2 or host_of(address) in self._site_hosts.values())
        ]
