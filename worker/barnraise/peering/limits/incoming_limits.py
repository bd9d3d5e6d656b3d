"""Bound the connections that others open, for each address and for each network. Pure.

A bare connection costs memory and a task, so these bounds come before a connection is accepted.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from barnraise.peering.addresses.addresses import network_of
from barnraise.peering.limits.pending_pool import PendingPool
from barnraise.peering.limits.rate_limit import TokenBuckets

Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True)
class ConnectionRates:
    """How many connections may come from an address, a network and all.

    Attributes:
        pending: Connections that are being established; the oldest makes room for the newest.
        per_second: Connections that are accepted on average.
        burst: Connections that are accepted at once.
    """

    pending: Mapping[str, int]
    per_second: Mapping[str, float]
    burst: Mapping[str, float]


class IncomingLimits(Generic[Item]):
    """Connections that are being established, and how often each address has connected."""

    def __init__(self, rates: ConnectionRates) -> None:
        """Have no connections yet.

        Args:
            rates: By kind of group, "address", "network" and, of those that are pending, "all".
        """
        self._most_pending = rates.pending["all"]
        self._pending: PendingPool[Item] = PendingPool(rates.pending)
        self._connects = {
            kind: TokenBuckets(rate, rates.burst[kind]) for kind, rate in rates.per_second.items()
        }

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def is_busy(self) -> bool:
        """Whether many connections are being established."""
        return len(self._pending) >= self._most_pending // 4

    def try_connect(self, address: str, now: float, is_validated: bool = True) -> bool:
        """Count a connection; return whether its address and network have not connected too often.

        Args:
            address: Of the sender, with a port where connections of one machine share one.
            now: Event loop time, in seconds.
            is_validated: Whether the sender receives what is sent to the address. Those that use
                somebody else's address do not use up its share.
        """
        return all(
            self._connects[kind].try_consume(f"{name} {is_validated}", 1, now)
            for kind, name in _groups_of(address).items()
        )

    def add(self, item: Item, address: str) -> list[Item]:
        """Add a connection; return those that were dropped for it; see `PendingPool.add`."""
        return self._pending.add(item, _groups_of(address))

    def discard(self, item: Item) -> None:
        """Remove a connection that is established, or has ended."""
        self._pending.discard(item)


def _groups_of(address: str) -> dict[str, str]:
    return {"address": address, "network": network_of(address)}
