"""What the handlers of one peer server share."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from barnraise.exchange.gossip.gossip import Gossip
from barnraise.exchange.ledger.ledger import Ledger
from barnraise.exchange.network.connection import Connection

RunInThread = Callable[..., Awaitable[Any]]  # runs a call with its arguments outside the event loop


@dataclass(frozen=True)
class HandlerContext:
    """Give handlers the ledger, the gossip state and a few acts of the server.

    Attributes:
        ledger: The run's ledger.
        gossip: The gossip state machine; it belongs to the event loop.
        connections: The connected peers by key; the server's own table.
        run_on_disk: Runs a call in the disk thread; calls run one after the other.
        spawn: Starts a task that ends with the server.
        disconnect: Closes the connection to a peer, with a reason.
    """

    ledger: Ledger
    gossip: Gossip
    connections: Mapping[str, Connection]
    run_on_disk: RunInThread
    spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
    disconnect: Callable[[str, str], None]
