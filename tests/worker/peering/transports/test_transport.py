"""Channels of frames: over iroh on this machine, and the test double in memory."""

import asyncio
import time

import pytest
from helpers.network.memory_transport import SEND_WINDOW, MemoryNetwork
from helpers.network.transport_pairs import IDENTITIES, open_channel, start_transports

from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.peering.transports.transport import LEAVING, ChannelClosedError
from barnraise.protocol.messages import MAX_FRAME_BYTES, Peer


@pytest.mark.parametrize("kind", ["iroh", "memory"])
async def test_three_transports_exchange_frames_by_key(kind):
    transports = await start_transports(kind, 3)
    try:
        for one in transports:
            for other in transports:
                if one is not other:
                    dialled, accepted = await open_channel(one, other)
                    assert (dialled.peer, accepted.peer) == (other.key, one.key)
                    await accepted.send(b"back")
                    assert await dialled.receive() == b"back"
                    assert accepted.bytes_received >= 5 and dialled.bytes_sent >= 5
    finally:
        for transport in transports:
            await transport.close()


@pytest.mark.parametrize("kind", ["iroh", "memory"])
async def test_channels_of_a_protocol_meet_only_those_of_the_same(kind):
    memory = MemoryNetwork()
    transports = [
        IrohTransport(identity.secret, "127.0.0.1")
        if kind == "iroh"
        else memory.transport(identity.key)
        for identity in IDENTITIES
    ]
    one, other, _ = transports
    protocols = [transport.add_protocol("mixing") for transport in (one, other)]
    try:
        for transport in transports:
            await transport.start()
        peers = [Peer(key=each.key, addresses=each.addresses()) for each in transports]
        plain, _ = await open_channel(one, other)
        dialled = await protocols[0].connect(peers[1])
        await dialled.send(b"weights")
        accepted = await asyncio.wait_for(protocols[1].accept(), 60)
        assert await accepted.receive() == b"weights" and accepted.peer == one.key
        await plain.send(b"still there")
        with pytest.raises(ChannelClosedError):
            await protocols[0].connect(peers[2])
    finally:
        for transport in transports:
            await transport.close()


@pytest.mark.parametrize("kind", ["iroh", "memory"])
async def test_frames_of_every_size_arrive_whole_and_in_order(kind):
    a, b = await start_transports(kind)
    try:
        dialled, accepted = await open_channel(a, b)
        frames = [
            bytes([n % 251]) * size
            for n, size in enumerate((0, 1, 4, 4095, 70_000, MAX_FRAME_BYTES, 3, MAX_FRAME_BYTES))
        ]

        async def send():
            for frame in frames:
                await dialled.send(frame)

        sending = asyncio.create_task(send())
        assert [await accepted.receive() for _ in frames] == frames
        await sending
    finally:
        await a.close()
        await b.close()


@pytest.mark.parametrize("reason", ["your ticket expired", LEAVING])
@pytest.mark.parametrize("kind", ["iroh", "memory"])
async def test_closed_channel_gives_the_reason_to_the_other_side(kind, reason):
    a, b = await start_transports(kind)
    try:
        dialled, accepted = await open_channel(a, b)
        accepted.close(reason)
        with pytest.raises(ChannelClosedError, match=reason) as closed:
            await asyncio.wait_for(dialled.receive(), 10)
        assert closed.value.peer_left == (reason == LEAVING)
        with pytest.raises(ChannelClosedError):
            for _ in range(3):
                await dialled.send(b"anybody?")
                await asyncio.sleep(0.01)
    finally:
        await a.close()
        await b.close()


async def test_connect_to_an_absent_peer_raises_channel_closed():
    (a,) = await start_transports("memory", 1)
    with pytest.raises(ChannelClosedError):
        await a.connect(Peer(key=IDENTITIES[1].key, addresses=["memory:x"]))
    a = IrohTransport(IDENTITIES[0].secret, "127.0.0.1", dial_timeout=1.0)
    await a.start()
    try:
        # At this address another key listens than the one that is dialled.
        with pytest.raises(ChannelClosedError, match="no answer from aaaaaaaa") as caught:
            await asyncio.wait_for(a.connect(Peer(key="a" * 64, addresses=a.addresses())), 10)
        assert "\n" not in str(caught.value) and ".rs:" not in str(caught.value), (
            "the reason is a sentence, not a place in iroh's source"
        )
    finally:
        await a.close()


async def test_memory_channel_obeys_bandwidth_and_keeps_the_order():
    a, b = await start_transports("memory", bandwidth=1e6, delay=0.05, loss=0.3, seed=4)
    dialled, accepted = await open_channel(a, b)
    started_at = time.monotonic()
    frames = [bytes([n]) * 20_000 for n in range(10)]
    sending = asyncio.create_task(asyncio.wait_for(send_frames(dialled, frames), 10))
    assert [(await accepted.receive())[0] for _ in range(10)] == list(range(10))
    await sending
    assert time.monotonic() - started_at > 0.2


async def send_frames(channel, frames):
    for frame in frames:
        await channel.send(frame)


async def test_send_waits_while_the_receiver_does_not_drain():
    a, b = await start_transports("memory")
    dialled, accepted = await open_channel(a, b)
    sending = asyncio.create_task(send_frames(dialled, [b"x" * MAX_FRAME_BYTES] * 10))
    await asyncio.sleep(0.1)
    assert dialled.bytes_sent <= SEND_WINDOW + 10
    for _ in range(10):
        await accepted.receive()
    await sending


async def test_partition_closes_channels_and_refuses_dials_until_healed():
    a, b, c = await start_transports("memory", 3)
    dialled, _ = await open_channel(a, b)
    remaining, remaining_end = await open_channel(a, c)
    a.network.partition({a.key, c.key}, {b.key})
    with pytest.raises(ChannelClosedError):
        await asyncio.wait_for(dialled.receive(), 5)
    with pytest.raises(ChannelClosedError):
        await a.connect(Peer(key=b.key, addresses=b.addresses()))
    await remaining.send(b"still here")
    assert await remaining_end.receive() == b"still here"
    a.network.heal()
    await open_channel(a, b)
