"""Limit what this machine sends to addresses that do not answer. Pure.

Peers and sites report the addresses of peers, and a report may be false: then the address is that
of a victim, and a whole swarm dials it. One dial that is not answered costs about ten packets of
1,200 bytes. So an address backs off exponentially, whichever key it is dialled for, and all
unproven addresses of one host, and of one network, share a budget of dials. An address is proven
once a peer with the dialled key has answered there. Times are in seconds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from barnraise.peering.addresses.addresses import host_of, network_of
from barnraise.peering.limits.back_off import BackOff
from barnraise.peering.limits.service_budget import ServiceBudget
from barnraise.peering.limits.service_limits import Service
from barnraise.protocol.table_sizes import MANY, store_newest

MAX_ADDRESSES_PER_DIAL = 3  # addresses of one peer that are dialled at once
UNPROVEN_ADDRESS = BackOff(0.5, 3600.0)  # between two dials of an address that does not answer
PROVEN_ADDRESS = BackOff(0.5, 30.0)
MAX_PROVEN_FAILURES = 40  # dials without an answer after which an address is no longer proven


@dataclass
class AddressRecord:
    """What is remembered of an address.

    Attributes:
        failures: Dials in a row that were not answered.
        next_dial: When it may be dialled again, in seconds.
        is_proven: Whether a peer with the dialled key has answered there.
    """

    failures: int = 0
    next_dial: float = -math.inf
    is_proven: bool = False


class DialLimits:
    """Remember which addresses answer, and decide which may be dialled."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        """Know no address yet; `jitter` returns random numbers between 0 and 1."""
        self._jitter = jitter
        self._budget = ServiceBudget(Service.UNANSWERED_DIALS)
        self._addresses: dict[str, AddressRecord] = {}

    # ---- decisions

    def choose(self, addresses: Sequence[str], now: float) -> tuple[str, ...]:
        """Return the addresses of a peer to dial now; none if each has to wait.

        A proven address that answered the last time is dialled alone. The preferred ones are first.
        """
        ready = [address for address in addresses if self.ready_at(address, now) <= now]
        for address in ready:
            if self.is_proven(address) and not self._count_failures(address):
                return (address,)
        ready.sort(key=self._count_failures)
        return _few_of_each_host(ready)

    def choose_punched(self, addresses: Sequence[str], now: float) -> tuple[str, ...]:
        """Return the addresses of a peer to dial now that dials this machine at the same time.

        That they did not answer before does not count; the budgets of unproven addresses do.
        """
        ready = [
            address
            for address in addresses
            if self.is_proven(address) or self._budget.ready_at(_groups_of(address), now) <= now
        ]
        return _few_of_each_host(ready)

    def ready_at(self, address: str, now: float) -> float:
        """Return when an address may be dialled, in seconds."""
        record = self._addresses.get(address) or AddressRecord()
        if record.is_proven:
            return record.next_dial
        return max(record.next_dial, self._budget.ready_at(_groups_of(address), now))

    def is_proven(self, address: str) -> bool:
        """Return whether a peer with the dialled key has answered at an address."""
        record = self._addresses.get(address)
        return record is not None and record.is_proven

    # ---- events

    def on_dial(self, addresses: Sequence[str], now: float) -> None:
        """Record that addresses are being dialled."""
        for address in addresses:
            if not self.is_proven(address):
                self._budget.consume(_groups_of(address), 1.0, now)

    def on_answer(self, dialled: Sequence[str], answered: str, now: float) -> None:
        """Record at which of the dialled addresses the peer answered, with its key proven.

        The others count as silent: a peer may have named somebody else's address with its own.
        """
        for address in dialled:
            if address != answered:
                self.on_silence([address], now)
            elif not self.is_proven(address):
                self._budget.consume(_groups_of(address), -1.0, now)
        store_newest(self._addresses, answered, AddressRecord(is_proven=True), MANY)

    def on_silence(self, addresses: Sequence[str], now: float, is_isolated: bool = False) -> None:
        """Record that nobody with the dialled key answered at some addresses.

        The own network of an isolated machine, without any link, may be down: then proven addresses
        stay proven.
        """
        for address in addresses:
            record = self._addresses.get(address) or AddressRecord()
            record.failures = min(record.failures + 1, 1000)
            if record.failures > MAX_PROVEN_FAILURES and not is_isolated:
                record.is_proven = False
            back_off = PROVEN_ADDRESS if record.is_proven else UNPROVEN_ADDRESS
            delay = back_off.pause_seconds(record.failures)
            record.next_dial = now + delay * (0.75 + self._jitter() / 2)
            store_newest(self._addresses, address, record, MANY)

    def _count_failures(self, address: str) -> int:
        record = self._addresses.get(address)
        return record.failures if record else 0


def _few_of_each_host(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the first addresses; a peer does not need more than two ports of one host."""
    chosen: list[str] = []
    hosts: dict[str, int] = {}
    for address in addresses:
        host = host_of(address)
        hosts[host] = hosts.get(host, 0) + 1
        if hosts[host] <= 2:
            chosen.append(address)
    return tuple(chosen[:MAX_ADDRESSES_PER_DIAL])


def _groups_of(address: str) -> dict[str, str]:
    return {"host": host_of(address), "network": network_of(address)}
