"""Bound the open websockets of one process, with room for visitors of every network. Pure.

Anybody may open sockets, and each costs memory and a file descriptor. While there is plenty of room
nobody is refused: a school's visitors come from one address. Once half of the places are taken, a
network that has many sockets cannot open further ones.
"""

from collections import Counter

MAX_SOCKETS = 8000  # of one process
MAX_OF_NETWORK = 200  # of one network, once half of all places are taken


class WatcherLimits:
    """The open sockets of a process, by network."""

    def __init__(self, most: int = MAX_SOCKETS, most_of_network: int = MAX_OF_NETWORK) -> None:
        """Start without sockets.

        Args:
            most: how many may be open.
            most_of_network: how many of one network may be, once half of all places are taken.
        """
        self._most = most
        self._most_of_network = most_of_network
        self._open: Counter[str] = Counter()

    def admit(self, network: str) -> bool:
        """Count a socket from a network, if there is a place for it; return whether there is."""
        total = self._open.total()
        is_crowded = 2 * total >= self._most and self._open[network] >= self._most_of_network
        if total >= self._most or is_crowded:
            return False
        self._open[network] += 1
        return True

    def remove(self, network: str) -> None:
        """Free the place of a socket that was admitted."""
        self._open[network] -= 1
        if not self._open[network]:
            del self._open[network]
