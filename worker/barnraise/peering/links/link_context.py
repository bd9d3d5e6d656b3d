"""What the handlers of connections share."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from barnraise.peering.links.connection import Connection
from barnraise.peering.membership.membership import PartialView, PeerLink


@dataclass(frozen=True)
class LinkContext:
    """Give handlers the connections and a few acts of the server.

    Attributes:
        connections: The connected peers by key; the server's own table.
        membership: Which peers this machine knows; it belongs to the event loop.
        links: The links to the connected peers by key, as `membership` sees them.
        spawn: Starts a task that ends with the server.
        disconnect: Closes the connection to a peer, with a reason.
        wake: Has gossip decide again: a fact has changed.
    """

    connections: Mapping[str, Connection]
    membership: PartialView
    links: Mapping[str, PeerLink]
    spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
    disconnect: Callable[[str, str], None]
    wake: Callable[[], None]
