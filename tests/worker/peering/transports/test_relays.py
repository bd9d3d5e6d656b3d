"""Test relays that do not answer: no relay server runs on the machines that run the tests."""

import asyncio

import pytest

from barnraise.peering.addresses.addresses import port_of
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.peering.transports.transport import ChannelClosedError
from barnraise.protocol.messages import Peer
from barnraise.protocol.signing import Identity

RELAYS = ["https://127.0.0.1:1/", "https://127.0.0.1:2/"]
SECONDS = 60.0


async def test_relays_that_do_not_answer_stop_no_direct_link() -> None:
    one, other = (IrohTransport(Identity(bytes([n]) * 32).secret) for n in (1, 2))
    await one.start()
    await other.start()
    try:
        for transport in (one, other):
            await transport.set_relays(RELAYS)
        addresses = [RELAYS[0], f"127.0.0.1:{port_of(other.addresses()[0])}"]
        async with asyncio.timeout(SECONDS):
            dialled = await one.connect(Peer(key=other.key, addresses=addresses))
            await dialled.send(b"hello")
            accepted = await other.accept()
            assert await accepted.receive() == b"hello"
        assert not dialled.is_relayed and not accepted.is_relayed
        assert all(not address.startswith("https") for address in one.addresses())
        await one.set_relays([])
        await dialled.send(b"still there")
        assert await accepted.receive() == b"still there"
    finally:
        await one.close()
        await other.close()


async def test_peer_behind_a_relay_that_does_not_answer_is_given_up() -> None:
    transport = IrohTransport(Identity(bytes([1]) * 32).secret, dial_timeout=1.0)
    await transport.start()
    try:
        await transport.set_relays([*RELAYS, "default"])
        await transport.set_relays(RELAYS)
        with pytest.raises(ChannelClosedError, match="no answer"):
            await transport.connect(Peer(key="a" * 64, addresses=[RELAYS[0]]))
    finally:
        await transport.close()
