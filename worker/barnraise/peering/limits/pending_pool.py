"""Bound what waits, and drop the oldest to make room for the newest. Pure.

A flood that fills a pool which refuses newcomers keeps everybody else out for as long as it lasts.
Where the oldest is dropped instead, somebody who needs a moment gets it, and only those that do
nothing are dropped. Limits by group keep a flood from one address from dropping others.
"""

from collections.abc import Mapping
from typing import Generic, TypeVar

Item = TypeVar("Item")


class PendingPool(Generic[Item]):
    """Items that wait, in order of arrival, each a member of some groups."""

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
