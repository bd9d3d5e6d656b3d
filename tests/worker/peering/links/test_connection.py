"""What waits to be sent to one peer costs the same, however much the peer has requested."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from helpers.memory_transport import MemoryNetwork

from barnraise.peering.limits.service_limits import SERVICE_LIMITS, Rate, Service
from barnraise.peering.links import connection as connection_module
from barnraise.peering.links.connection import Connection
from barnraise.protocol.messages import Hello, Peer, Ticket

REQUESTS = 2000


class ComparedText(str):
    """A text that counts how often any of its kind is compared."""

    __slots__ = ()
    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        ComparedText.comparisons += 1
        return str.__eq__(self, other)


@asynccontextmanager
async def open_connection():
    """Provide a connection to a peer that sends and reads nothing."""
    network = MemoryNetwork()
    one, other = network.transport("a" * 64), network.transport("b" * 64)
    await one.start()
    await other.start()
    channel = await one.connect(Peer(key="b" * 64, addresses=["memory:x"]))
    hello, ticket = Hello.model_construct(), Ticket.model_construct(volunteer="v" * 64)
    try:
        yield Connection(channel, hello, ticket, dialled=True, connected_at=0.0)
    finally:
        await one.close()
        await other.close()


async def test_requests_are_not_compared_with_all_that_were_made_before():
    """A peer requests thousands of updates and blobs, each of them twice."""
    async with open_connection() as connection:
        request_all(connection)
    assert REQUESTS < connection_module.MAX_QUEUED_TRANSFERS
    assert ComparedText.comparisons < 4 * REQUESTS, "each request walks over those before it"


def request_all(connection: Connection) -> None:
    """Request updates and blobs, each of them twice, and count the comparisons."""
    ComparedText.comparisons = 0
    for _ in range(2):
        for number in range(REQUESTS):
            name = ComparedText(f"{number:064x}")
            connection.send_update(name, 1)
            connection.send_blob(name, 0)


async def test_flood_of_requests_waits_for_its_own_rate(monkeypatch):
    """A peer asks for 64 updates in each of many small messages."""
    requested = {"peer": Rate(1e-6, 640.0)}
    monkeypatch.setitem(SERVICE_LIMITS, Service.REQUESTED_UPDATES, requested)
    async with open_connection() as connection:
        for _ in range(10):
            await connection.wait_for_requests(64)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.wait_for_requests(64), 0.1)
