"""Channels of frames: over iroh on this machine, and the test double in memory."""

import asyncio

import pytest
from helpers.network.transport_pairs import (
    IDENTITIES,
    create_transports,
    open_channel,
    start_transports,
    started,
)

from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.peering.transports.transport import LEAVING, ChannelClosedError
from barnraise.protocol.messages import MAX_FRAME_BYTES, Peer


@pytest.mark.parametrize("kind", ["iroh", "memory"])
async def test_three_transports_exchange_frames_by_key(kind):
    async with start_transports(kind, 3) as transports:
        for one in transports:
            for other in transports:
                if one is not other:
                    dialled, accepted = await open_channel(one, other)
                    assert (dialled.peer, accepted.peer) == (other.key, one.key)
                    await accepted.send(b"back")
                    assert await dialled.receive() == b"back"
                    assert accepted.bytes_received >= 5 and dialled.bytes_sent >= 5


@pytest.mark.parametrize("kind", ["iroh", "memory"])
async def test_channels_of_a_protocol_meet_only_those_of_the_same(kind):
    transports = create_transports(kind, 3)
    one, other, _ = transports
    protocols = [transport.add_protocol("mixing") for transport in (one, other)]
    async with started(*transports):
        peers = [Peer(key=each.key, addresses=each.addresses()) for each in transports]
        plain, _ = await open_channel(one, other)
        dialled = await protocols[0].connect(peers[1])
        await dialled.send(b"weights")
        accepted = await asyncio.wait_for(protocols[1].accept(), 60)
        assert await accepted.receive() == b"weights" and accepted.peer == one.key
        await plain.send(b"still there")
        with pytest.raises(ChannelClosedError):
            await protocols[0].connect(peers[2])


@pytest.mark.parametrize("kind", ["iroh", "memory"])
async def test_frames_of_every_size_arrive_whole_and_in_order(kind):
    async with start_transports(kind) as (a, b):
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


@pytest.mark.parametrize("reason", ["your ticket expired", LEAVING])
@pytest.mark.parametrize("kind", ["iroh", "memory"])
async def test_closed_channel_gives_the_reason_to_the_other_side(kind, reason):
    async with start_transports(kind) as (a, b):
        dialled, accepted = await open_channel(a, b)
        accepted.close(reason)
        with pytest.raises(ChannelClosedError, match=reason) as closed:
            await asyncio.wait_for(dialled.receive(), 10)
        assert closed.value.peer_left == (reason == LEAVING)
        with pytest.raises(ChannelClosedError):
            for _ in range(3):
                await dialled.send(b"anybody?")
                await asyncio.sleep(0.01)


async def test_connect_to_an_absent_peer_raises_channel_closed():
    async with start_transports("memory", 1) as (a,):
        with pytest.raises(ChannelClosedError):
            await a.connect(Peer(key=IDENTITIES[1].key, addresses=["memory:x"]))
    async with started(IrohTransport(IDENTITIES[0].secret, "127.0.0.1", dial_timeout=1.0)) as (a,):
        # At this address another key listens than the one that is dialled.
        with pytest.raises(ChannelClosedError, match="no answer from aaaaaaaa") as caught:
            await asyncio.wait_for(a.connect(Peer(key="a" * 64, addresses=a.addresses())), 10)
        assert "\n" not in str(caught.value) and ".rs:" not in str(caught.value), (
            "the reason is a sentence, not a place in iroh's source"
        )
