"""Start transports of both kinds, iroh's and the one in memory, and open channels between them."""

import asyncio
import contextlib

from helpers.network.memory_transport import MemoryNetwork

from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.protocol.messages import Peer
from barnraise.protocol.signing import Identity

IDENTITIES = [Identity(bytes([number]) * 32) for number in (1, 2, 3)]


def create_transports(kind: str, count: int = 2, **network):
    if kind == "iroh":
        return [IrohTransport(identity.secret, "127.0.0.1") for identity in IDENTITIES[:count]]
    memory = MemoryNetwork(**network)
    return [memory.transport(identity.key) for identity in IDENTITIES[:count]]


@contextlib.asynccontextmanager
async def started(*transports):
    """Start transports, and close them in the end."""
    try:
        for transport in transports:
            await transport.start()
        yield transports
    finally:
        for transport in transports:
            await transport.close()


def start_transports(kind: str, count: int = 2, **network):
    return started(*create_transports(kind, count, **network))


async def open_channel(one, other):
    """Return both ends of a channel, with one frame sent: before that QUIC opens no stream."""
    dialled = await one.connect(Peer(key=other.key, addresses=other.addresses()))
    await dialled.send(b"hello")
    accepted = await asyncio.wait_for(other.accept(), 10)
    assert await accepted.receive() == b"hello"
    return dialled, accepted
