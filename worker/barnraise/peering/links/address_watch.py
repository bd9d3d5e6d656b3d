"""Notice that this machine or a peer came to another address while they stay linked.

QUIC moves a connection to the new path (RFC 9000, section 9), so no link ends. But what the two
stated in their greetings is no longer true: where each is reached, and where it is seen.
"""

import asyncio
from collections.abc import Callable, Mapping

from barnraise.peering.links.connection import Connection

WATCH_SECONDS = 5.0  # between two looks


class AddressWatch:
    """Introduce this machine again to peers where an address has changed."""

    def __init__(
        self,
        connections: Mapping[str, Connection],
        list_addresses: Callable[[], list[str]],
        introduce: Callable[[Connection], None],
        on_moved: Callable[[Connection], None],
    ) -> None:
        """Watch one server's connections.

        `introduce` sends a greeting to a peer; `on_moved` receives one with another address now.
        """
        self._connections = connections
        self._list_addresses = list_addresses
        self._introduce = introduce
        self._on_moved = on_moved

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            addresses = frozenset(self._list_addresses())
            for connection in list(self._connections.values()):
                has_moved = connection.channel.refresh_remote_address()
                if has_moved:
                    self._on_moved(connection)
                if has_moved or connection.stated_addresses != addresses:
                    self._introduce(connection)
