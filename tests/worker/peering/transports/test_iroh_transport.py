"""QUIC on this machine: frames, floods, ports, probes and relays that do not answer."""

import asyncio
import contextlib

import iroh
import pytest
from helpers.network.stream_pieces import split_stream
from helpers.network.transport_pairs import IDENTITIES, open_channel, start_transports, started
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.peering.addresses.addresses import port_of
from barnraise.peering.transports.iroh_transport import ALPN, IrohTransport
from barnraise.peering.transports.transport import ChannelClosedError
from barnraise.protocol.messages import MAX_FRAME_BYTES, Peer
from barnraise.protocol.signing import Identity

RELAYS = ["https://127.0.0.1:1/", "https://127.0.0.1:2/"]
SECONDS = 60.0


async def test_too_long_frame_is_refused_before_it_is_read():
    async with start_transports("iroh") as (a, b):
        dialled, accepted = await open_channel(a, b)
        await dialled.send_stream.write_all((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(ChannelClosedError, match=str(MAX_FRAME_BYTES + 1)):
            await asyncio.wait_for(accepted.receive(), 10)
        with pytest.raises(ChannelClosedError, match="at most"):
            await asyncio.wait_for(dialled.receive(), 10)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, 30_000), max_size=12),
    st.lists(st.integers(1, 20_000), min_size=1, max_size=8),
)
def test_frames_arrive_whole_however_the_stream_is_split(sizes, piece_sizes):
    frames = [bytes([n + 1]) * size for n, size in enumerate(sizes)]

    async def send_in_pieces():
        async with start_transports("iroh") as (a, b):
            dialled, accepted = await open_channel(a, b)
            stream = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)
            for piece in split_stream(stream, piece_sizes):
                await dialled.send_stream.write_all(piece)
            assert [await asyncio.wait_for(accepted.receive(), 10) for _ in frames] == frames
            assert accepted.bytes_received >= len(stream) + len(b"hello") + 4

    asyncio.run(send_in_pieces())


async def test_bytes_of_a_closed_channel_are_still_counted():
    async with start_transports("iroh") as (a, b):
        dialled, accepted = await open_channel(a, b)
        await dialled.send(bytes(50_000))
        assert await asyncio.wait_for(accepted.receive(), 10) == bytes(50_000)
        dialled.close("the end")
        with pytest.raises(ChannelClosedError):
            await asyncio.wait_for(accepted.receive(), 10)
        assert dialled.bytes_sent > 50_000 and accepted.bytes_received > 50_000


async def test_stream_that_ends_within_a_frame_raises_channel_closed():
    async with start_transports("iroh") as (a, b):
        dialled, accepted = await open_channel(a, b)
        await dialled.send_stream.write_all((10).to_bytes(4, "big") + b"half")
        await dialled.send_stream.finish()
        with pytest.raises(ChannelClosedError, match="ended the channel"):
            await asyncio.wait_for(accepted.receive(), 10)


async def bind_endpoint() -> iroh.Endpoint:
    builder = iroh.EndpointBuilder()
    builder.apply_minimal()
    builder.relay_mode(iroh.RelayMode.disabled())
    builder.bind_addr("127.0.0.1:0")
    return await builder.bind()


async def test_flood_of_bare_connections_is_bounded_and_keeps_nobody_out():
    """One address opens connections without a stream; another machine connects meanwhile."""
    endpoint = await bind_endpoint()
    opened, largest = [], 0

    async def open_bare(address: iroh.EndpointAddr):
        with contextlib.suppress(iroh.IrohError):
            opened.append(await endpoint.connect(address, ALPN))

    async with start_transports("iroh") as (a, b):
        address = iroh.EndpointAddr(iroh.EndpointId.from_string(a.key), None, a.addresses()[:1])
        flood = [asyncio.create_task(open_bare(address)) for _ in range(200)]
        for _ in range(10):
            await asyncio.sleep(0.05)
            largest = max(largest, a.pending_connections)
        await open_channel(b, a)
        assert largest <= 4, "connections of one address that are being established"
        assert len(opened) <= 20, "connections of one address that were accepted"
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
    await endpoint.close()


async def test_start_on_a_used_port_raises_os_error():
    async with start_transports("iroh", 1) as (a,):
        port = int(next(at for at in a.addresses() if at.startswith("127.")).rpartition(":")[2])
        with pytest.raises(OSError, match="cannot listen on"):
            await IrohTransport(IDENTITIES[1].secret, "127.0.0.1", port).start()


async def test_one_port_serves_both_versions_of_ip() -> None:
    async with started(IrohTransport(Identity(b"1" * 32).secret)) as (transport,):
        port = transport.mappable_port
        assert {port_of(address) for address in transport.addresses()} == {port}
        taken = IrohTransport(Identity(b"2" * 32).secret, port=port)
        with pytest.raises(OSError, match="cannot listen"):
            await taken.start()


async def test_port_on_this_computer_alone_is_not_mapped() -> None:
    async with started(IrohTransport(Identity(b"1" * 32).secret, "127.0.0.1")) as (transport,):
        assert transport.mappable_port == 0


async def test_relays_that_do_not_answer_stop_no_direct_link() -> None:
    transports = [IrohTransport(identity.secret) for identity in IDENTITIES[:2]]
    async with started(*transports) as (one, other):
        for transport in transports:
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


async def test_peer_behind_a_relay_that_does_not_answer_is_given_up() -> None:
    impatient = IrohTransport(IDENTITIES[0].secret, dial_timeout=1.0)
    async with started(impatient) as (transport,):
        await transport.set_relays([*RELAYS, "default"])
        await transport.set_relays(RELAYS)
        with pytest.raises(ChannelClosedError, match="no answer"):
            await transport.connect(Peer(key="a" * 64, addresses=[RELAYS[0]]))


async def test_probe_of_a_stranger_is_answered_counted_and_opens_no_channel() -> None:
    async with start_transports("iroh") as (a, b):
        assert await a.probe(Peer(key=b.key, addresses=b.addresses()))
        assert b.probes_received == 1 and a.probes_received == 0
        # At this address another key listens than the one that is probed.
        async with asyncio.timeout(SECONDS):
            assert not await a.probe(Peer(key=IDENTITIES[2].key, addresses=b.addresses()))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(b.accept(), 0.1)
