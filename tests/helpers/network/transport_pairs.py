"""Start transports of both kinds, iroh's and the one in memory, and open channels between them."""

import asyncio

from helpers.network.memory_transport import MemoryNetwork

from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.protocol.messages import Peer
from barnraise.protocol.signing import Identity

IDENTITIES = [Identity(bytes([number]) * 32) for number in (1, 2, 3)]


async def start_transports(kind: str, count: int = 2, **network):
    if kind == "iroh":
        transports = [
            IrohTransport(identity.secret, "127.0.0.1") for identity in IDENTITIES[:count]
        ]
    else:
        memory = MemoryNetwork(**network)
        transports = [memory.transport(identity.key) for identity in IDENTITIES[:count]]
    for transport in transports:
        await transport.start()
    return transports


async def open_channel(one, other):
    """Return both ends of a channel, with one frame sent: before that QUIC opens no stream."""
    dialled = await one.connect(Peer(key=other.key, addresses=other.addresses()))
    await dialled.send(b"hello")
    accepted = await asyncio.wait_for(other.accept(), 10)
    assert await accepted.receive() == b"hello"
    return dialled, accepted
