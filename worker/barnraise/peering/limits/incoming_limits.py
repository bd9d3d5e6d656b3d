"""Bound the connections that others open, for each address and for each network. Pure.

A bare connection costs memory and a task, so these bounds come before a connection is accepted.
"""

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

from barnraise.peering.addresses.addresses import network_of
from barnraise.peering.limits.service_budget import ServiceBudget
from barnraise.peering.limits.service_limits import WAITING_LIMITS, Service

Item = TypeVar("Item", bound=Hashable)


class PendingPool(Generic[Item]):
    """Items that wait, in order of arrival, each a member of some groups.

    A flood that fills a pool which refuses newcomers keeps everybody else out for as long as it
    lasts. Where the oldest is dropped instead, somebody who needs a moment gets it, and only those
    that do nothing are dropped. Limits by group keep a flood from one address from dropping others.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        """Limit groups.

        Args:
            limits: Kind of group → how many items one group of that kind may have. A group of the
                kind "all" has all items.
        """
        self._limits = limits
        self._groups: dict[Item, dict[str, str]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, item: Item, groups: Mapping[str, str]) -> list[Item]:
        """Add an item; return those that were dropped for it, the oldest of each full group.

        Args:
            item: The item.
            groups: Kind of group → name of the item's group of that kind.
        """
        self._groups[item] = {**groups, "all": ""}
        dropped: list[Item] = []
        for kind, name in self._groups[item].items():
            members = [other for other, of in self._groups.items() if of.get(kind) == name]
            for oldest in members[: max(0, len(members) - self._limits[kind])]:
                del self._groups[oldest]
                dropped.append(oldest)
        return dropped

    def discard(self, item: Item) -> None:
        """Remove an item that waits no longer, if it was not dropped."""
        self._groups.pop(item, None)


class IncomingLimits(Generic[Item]):
    """Connections that are being established, and how often each address has connected.

    Attributes:
        pending: The connections that are being established.
    """

    def __init__(self, service: Service) -> None:
        self.pending: PendingPool[Item] = PendingPool(WAITING_LIMITS[service])
        self._most_pending = WAITING_LIMITS[service]["all"]
        self._connects = ServiceBudget(service)

    @property
    def is_busy(self) -> bool:
        """Whether many connections are being established."""
        return len(self.pending) >= self._most_pending // 4

    def try_connect(self, address: str, now: float, is_validated: bool = True) -> bool:
        """Count a connection; return whether its address and network have not connected too often.

        Args:
            address: Of the sender, with a port where connections of one machine share one.
            now: Event loop time, in seconds.
            is_validated: Whether the sender receives what is sent to the address. Those that use
                somebody else's address do not use up its share.
        """
        groups = groups_of(address)
        names = {kind: f"{name} {is_validated}" for kind, name in groups.items()}
        return self._connects.try_consume(names, now)


def groups_of(address: str) -> dict[str, str]:
    """Return the groups of `PendingPool.add` to which an address belongs."""
    return {"address": address, "network": network_of(address)}
