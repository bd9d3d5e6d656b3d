"""What a peer requests or sends costs others nothing, however much that is."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from helpers.network.memory_transport import MemoryNetwork
from helpers.network.raw_peer import connect_raw_peer, limit_peers
from helpers.updates.forged_updates import STRANGER, build_push
from helpers.wait_for import within

from barnraise.peering.limits.service_limits import SERVICE_LIMITS, Rate, Service
from barnraise.peering.links import connection as connection_module
from barnraise.peering.links.connection import Connection
from barnraise.peering.transports.framing import pack
from barnraise.protocol.messages import Hello, Peer, PeerState, Ticket

REQUESTS = 2000
FLOOD = 2000  # messages; at 50 a second the test ends before all are accepted


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
    hello = Hello.model_construct(protocols=[1])
    ticket = Ticket.model_construct(volunteer="v" * 64)
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


def test_flood_of_valid_headers_is_verified_at_a_bounded_rate(world, monkeypatch):
    """Each header is of another incarnation, so that each has a signature to verify."""
    limit_peers(monkeypatch, Service.UPDATE_HEADERS, Rate(5.0, 10.0))
    a, b = (world.machine(n).start() for n in (1, 2))
    with connect_raw_peer(world, a) as send:
        for life in range(200):
            send(build_push(world, STRANGER, incarnation=f"{life:016x}"))
        b.add_peers(a)
        for seed in range(3):
            b.publish_round(seed)
            world.wait_for_agreement(a, b)
        incomplete = a.exchange.server.updates.incomplete
        assert 0 < len(incomplete) < 200, "the other headers still wait"


def test_flood_of_messages_slows_only_its_sender(world, monkeypatch):
    limit_peers(monkeypatch, Service.FRAMES, Rate(50.0, 100.0))
    a, b = (world.machine(n).start() for n in (1, 2))
    channels = []
    with connect_raw_peer(world, a, channels=channels):
        channel, run = channels[0]

        async def flood():
            for count in range(FLOOD):
                await channel.send(pack(PeerState(vector={}, rate=count)))

        run(flood())
        b.add_peers(a)
        with within(30):
            for seed in range(3):
                a.publish_round(seed)
                world.wait_for_agreement(a, b)
        time.sleep(1.0)
        newest_rate = a.exchange.server.gossip.links[STRANGER.key].rate
        assert 50 < newest_rate < FLOOD - 1, "the other messages still wait"
