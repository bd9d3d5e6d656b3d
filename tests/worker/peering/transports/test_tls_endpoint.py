"""TLS channels between endpoints on this machine, honest and hostile ones."""

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from dataclasses import replace

import pytest
from helpers.network.certificates import create_server_context
from helpers.network.stream_pieces import split_stream
from helpers.network.transport_pairs import started
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.peering.addresses.addresses import host_of, port_of
from barnraise.peering.limits.timeouts import TIMEOUTS, ConnectionTimeouts
from barnraise.peering.transports import tls_channel, tls_endpoint
from barnraise.peering.transports.iroh_transport import IrohChannel, IrohTransport, find_free_port
from barnraise.peering.transports.tls_channel import TlsChannel, peer_certificate
from barnraise.peering.transports.tls_endpoint import TlsEndpoint
from barnraise.peering.transports.transport import ChannelClosedError
from barnraise.protocol.messages import MAX_FRAME_BYTES, ChannelGreeting, ChannelProof, Peer, Signed
from barnraise.protocol.signing import Identity, digest

IDENTITIES = [Identity(bytes([number]) * 32) for number in (1, 2, 3)]
DIALLER, LISTENER, OTHER = IDENTITIES
PROTOCOL = b"barnraise/test/1"
HEADER = struct.Struct(">BI")  # kind, length
FRAME, GOODBYE = 0, 2


class Machine:
    """An endpoint that listens on loopback, and the channels that others opened to it."""

    def __init__(self, identity: Identity, host: str = "127.0.0.1", protocol: bytes = PROTOCOL):
        self.key = identity.key
        self.accepted: asyncio.Queue[TlsChannel] = asyncio.Queue()
        self.endpoint = TlsEndpoint(identity, lambda _, channel: self.accepted.put_nowait(channel))
        self.endpoint.add_protocol(protocol)
        self.address = f"{host}:{free_port(host)}"
        self.endpoint.listen([self.address])

    async def accept(self) -> TlsChannel:
        return await asyncio.wait_for(self.accepted.get(), 10)

    async def connect(self, other: "Machine", key: str = "") -> TlsChannel:
        peer = Peer(key=key or other.key, addresses=[other.address])
        return await self.endpoint.connect(PROTOCOL, peer)


def free_port(host: str) -> int:
    """Return a TCP port that nobody listens on."""
    family = socket.AF_INET6 if "[" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host.strip("[]"), 0))
        return probe.getsockname()[1]


@contextlib.asynccontextmanager
async def machines(*identities: Identity):
    """Start a machine for each identity, and close them."""
    started = [Machine(identity) for identity in identities]
    try:
        yield started
    finally:
        for machine in started:
            await machine.endpoint.close()


async def open_stream(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a TLS connection without proving anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([PROTOCOL.decode()])
    return await asyncio.open_connection(
        host_of(address), port_of(address), ssl=context, server_hostname=""
    )


async def open_proven_stream(machine: Machine) -> tuple[TlsChannel, asyncio.StreamWriter]:
    """Open a channel whose bytes the test writes by itself."""
    reader, writer = await open_stream(machine.address)
    channel = TlsChannel(reader, writer, machine.address)
    await channel.prove_keys(OTHER, digest(peer_certificate(writer)), machine.key)
    return channel, writer


async def expect_closed(channel: TlsChannel, match: str) -> None:
    with pytest.raises(ChannelClosedError, match=match):
        while True:
            await asyncio.wait_for(channel.receive(), 10)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_machines_exchange_frames_of_every_size_by_key(host):
    dialler, listener = Machine(DIALLER, host), Machine(LISTENER, host)
    frames = [
        bytes([n]) * size
        for n, size in enumerate((0, 1, 4096, 70_000, MAX_FRAME_BYTES, 3, MAX_FRAME_BYTES))
    ]
    try:
        dialled = await dialler.connect(listener)
        accepted = await listener.accept()
        assert (dialled.peer, accepted.peer) == (LISTENER.key, DIALLER.key)
        assert (dialled.remote_address, accepted.remote_address) == (listener.address, "")

        async def send(channel):
            for frame in frames:
                await channel.send(frame)

        sending = [asyncio.create_task(send(channel)) for channel in (dialled, accepted)]
        for channel in (dialled, accepted):
            assert [await asyncio.wait_for(channel.receive(), 10) for _ in frames] == frames
        await asyncio.gather(*sending)
        assert accepted.bytes_received == dialled.bytes_sent > sum(map(len, frames))
    finally:
        await dialler.endpoint.close()
        await listener.endpoint.close()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, 30_000), max_size=12),
    st.lists(st.integers(1, 20_000), min_size=1, max_size=8),
)
def test_frames_arrive_whole_however_tcp_splits_them(sizes, piece_sizes):
    frames = [bytes([n + 1]) * size for n, size in enumerate(sizes)]
    stream = b"".join(HEADER.pack(FRAME, len(frame)) + frame for frame in frames)

    async def send_in_pieces():
        async with machines(LISTENER) as (listener,):
            _, writer = await open_proven_stream(listener)
            accepted = await listener.accept()
            for piece in split_stream(stream, piece_sizes):
                writer.write(piece)
                await writer.drain()
            assert [await asyncio.wait_for(accepted.receive(), 10) for _ in frames] == frames

    asyncio.run(send_in_pieces())


async def test_dial_of_another_key_at_an_address_is_refused():
    async with machines(DIALLER, LISTENER) as (dialler, listener):
        with pytest.raises(ChannelClosedError, match=f"no answer from {OTHER.key[:8]} by TCP"):
            await dialler.connect(listener, key=OTHER.key)
        assert listener.accepted.empty()
        await dialler.connect(listener)
        assert (await listener.accept()).peer == DIALLER.key


async def test_dial_of_an_address_where_nobody_listens_fails_soon():
    async with machines(DIALLER) as (dialler,):
        peer = Peer(key=OTHER.key, addresses=[f"127.0.0.1:{free_port('127.0.0.1')}"])
        with pytest.raises(ChannelClosedError, match="by TCP"):
            await asyncio.wait_for(dialler.endpoint.connect(PROTOCOL, peer), 5)
        with pytest.raises(ChannelClosedError, match="by TCP"):
            await dialler.endpoint.connect(PROTOCOL, Peer(key=OTHER.key, addresses=[]))


async def test_first_address_at_which_the_key_is_proven_counts():
    async with machines(DIALLER, LISTENER, OTHER) as (dialler, listener, other):
        closed = f"127.0.0.1:{free_port('127.0.0.1')}"
        peer = Peer(key=LISTENER.key, addresses=[closed, other.address, listener.address])
        channel = await dialler.endpoint.connect(PROTOCOL, peer)
        assert channel.remote_address == listener.address


async def test_machine_of_another_protocol_is_refused():
    async with machines(DIALLER) as (dialler,):
        listener = Machine(LISTENER, protocol=b"barnraise/other/1")
        try:
            with pytest.raises(ChannelClosedError, match="by TCP"):
                await dialler.connect(listener)
        finally:
            await listener.endpoint.close()


async def copy_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()


async def test_machine_between_two_others_cannot_pass_on_their_proofs(tmp_path):
    """It has a certificate of its own, and copies all bytes between two TLS connections."""
    copied = asyncio.Event()

    async def serve(reader, writer):
        other_reader, other_writer = await open_stream(listener.address)
        directions = (reader, other_writer), (other_reader, writer)
        await asyncio.gather(*(copy_bytes(*direction) for direction in directions))
        copied.set()

    async with machines(DIALLER, LISTENER) as (dialler, listener):
        context = create_server_context(tmp_path / "between.pem", "between")
        context.set_alpn_protocols([PROTOCOL.decode()])
        async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as relay:
            address = f"127.0.0.1:{relay.sockets[0].getsockname()[1]}"
            with pytest.raises(ChannelClosedError, match="by TCP"):
                await dialler.endpoint.connect(
                    PROTOCOL, Peer(key=LISTENER.key, addresses=[address])
                )
            await asyncio.wait_for(copied.wait(), 10)
        assert listener.accepted.empty()
        await dialler.connect(listener)
        assert (await listener.accept()).peer == DIALLER.key


def forge_proof(certificate: str, nonce: str, fault: str) -> Signed:
    """Return a proof of OTHER's for LISTENER in which one thing is wrong."""
    proof = ChannelProof(
        certificate=digest("another") if fault == "certificate" else certificate,
        peer=DIALLER.key if fault == "peer" else LISTENER.key,
        nonce=digest("of an earlier connection") if fault == "nonce" else nonce,
    )
    signer = DIALLER if fault == "signer" else OTHER
    return signer.sign("tls-listener" if fault == "kind" else "tls-dialler", proof)


@pytest.mark.parametrize("fault", ["certificate", "peer", "nonce", "signer", "kind", ""])
async def test_dialler_whose_proof_is_for_something_else_is_refused(fault):
    async with machines(LISTENER) as (listener,):
        reader, writer = await open_stream(listener.address)
        channel = TlsChannel(reader, writer, "")
        await channel.send(
            ChannelGreeting(key=OTHER.key, nonce=digest("ours")).model_dump_json().encode()
        )
        greeting = ChannelGreeting.model_validate_json(await channel.receive())
        proof = forge_proof(digest(peer_certificate(writer)), greeting.nonce, fault)
        await channel.send(proof.model_dump_json().encode())
        if fault:
            await expect_closed(channel, "prove your key sooner")
            assert listener.accepted.empty()
        else:
            assert (await listener.accept()).peer == OTHER.key


@pytest.mark.parametrize(
    "data",
    [
        HEADER.pack(FRAME, 5000) + bytes(5000),
        HEADER.pack(FRAME, 2) + b"{}",
        HEADER.pack(FRAME, 3) + b"\xff\xfe\xfd",
        HEADER.pack(GOODBYE, 1 << 30),
        HEADER.pack(7, 0),
        b"GET / HTTP/1.1\r\nHost: barnraise\r\n\r\n",
    ],
)
async def test_dialler_that_introduces_itself_with_garbage_is_refused(data):
    async with machines(DIALLER, LISTENER) as (dialler, listener):
        _, plain = await asyncio.open_connection("127.0.0.1", port_of(listener.address))
        plain.write(data)
        reader, writer = await open_stream(listener.address)
        writer.write(data)
        assert await asyncio.wait_for(reader.read(), 10)  # its greeting, and a farewell
        assert listener.accepted.empty()
        await dialler.connect(listener)
        assert (await listener.accept()).peer == DIALLER.key
        for each in (writer, plain):
            each.close()


async def test_flood_of_bare_connections_is_bounded_and_keeps_nobody_out():
    """One address opens TCP connections and sends nothing; another machine connects meanwhile."""
    async with machines(DIALLER, LISTENER) as (dialler, listener):
        flood = [
            await asyncio.open_connection(
                "127.0.0.1", port_of(listener.address), local_addr=("127.0.0.2", 0)
            )
            for _ in range(100)
        ]
        await dialler.connect(listener)
        assert (await listener.accept()).peer == DIALLER.key
        # 16 of the flood, and for a moment after it was accepted the other machine's.
        assert listener.endpoint.pending_connections <= 16 + 1
        beyond = flood[:48] + flood[64:]  # dropped for newer ones, and refused
        ended = [await asyncio.wait_for(reader.read(1), 10) for reader, _ in beyond]
        assert not any(ended), "connections beyond the limits are closed"
        for _, writer in flood:
            writer.close()


async def test_closed_channel_gives_the_reason_to_the_other_side():
    async with machines(DIALLER, LISTENER) as (dialler, listener):
        dialled, accepted = await dialler.connect(listener), await listener.accept()
        accepted.close("your ticket expired")
        accepted.close("a second time")
        await expect_closed(dialled, "your ticket expired")
        await expect_closed(accepted, "your ticket expired")
        with pytest.raises(ChannelClosedError, match="your ticket expired"):
            await dialled.send(b"anybody?")


async def test_close_of_a_channel_that_nobody_reads_ends_its_connection():
    async with machines(DIALLER, LISTENER) as (dialler, listener):
        dialled = await dialler.connect(listener)
        await listener.accept()
        sending = asyncio.create_task(send_without_end(dialled))
        await asyncio.sleep(0.2)
        assert not sending.done(), "a sender waits for a receiver that does not read"
        dialled.close("this machine stops")
        with pytest.raises(ChannelClosedError):
            await asyncio.wait_for(sending, 10)
        await asyncio.wait_for(dialled.wait_closed(), 10)


async def send_without_end(channel: TlsChannel) -> None:
    while True:
        await channel.send(bytes(MAX_FRAME_BYTES))


async def test_endpoint_that_closes_ends_its_channels():
    async with machines(DIALLER, LISTENER) as (dialler, listener):
        dialled = await dialler.connect(listener)
        await listener.accept()
        await listener.endpoint.close()
        await expect_closed(dialled, "the machine stops")
        with pytest.raises(ChannelClosedError, match="by TCP"):
            await dialler.connect(listener)


class ImpatientTimeouts(ConnectionTimeouts):
    """Expect a byte long before the other machine sends a frame to keep the channel alive."""

    silence_seconds = 1.0


async def test_channel_whose_machine_vanishes_ends(monkeypatch):
    monkeypatch.setattr(tls_channel, "TIMEOUTS", ImpatientTimeouts())
    async with machines(LISTENER) as (listener,):
        channel, _ = await open_proven_stream(listener)  # it sends nothing from here on
        accepted = await listener.accept()
        await expect_closed(accepted, "nothing was received for 1 s")
        await expect_closed(channel, "nothing was received for 1 s")


async def test_idle_channel_of_two_machines_stays_open(monkeypatch):
    monkeypatch.setattr(tls_channel, "TIMEOUTS", replace(TIMEOUTS, keep_alive_seconds=0.5))
    async with machines(DIALLER, LISTENER) as (dialler, listener):
        dialled, accepted = await dialler.connect(listener), await listener.accept()
        receiving = asyncio.create_task(accepted.receive())
        await asyncio.sleep(2.5)
        await dialled.send(b"still there")
        assert await asyncio.wait_for(receiving, 10) == b"still there"


@pytest.mark.parametrize(
    "data, reason",
    [
        (HEADER.pack(FRAME, MAX_FRAME_BYTES + 1), f"a frame of {MAX_FRAME_BYTES + 1} bytes"),
        (HEADER.pack(9, 0), "of a kind that does not exist"),
        (HEADER.pack(GOODBYE, 201), "of a kind that does not exist"),
    ],
)
async def test_proven_machine_that_breaks_the_protocol_is_dropped(data, reason):
    async with machines(LISTENER) as (listener,):
        channel, writer = await open_proven_stream(listener)
        accepted = await listener.accept()
        writer.write(data)
        with pytest.raises(ChannelClosedError, match="a frame of"):
            await asyncio.wait_for(accepted.receive(), 10)
        await expect_closed(channel, reason)


async def test_connection_that_ends_within_a_frame_raises_channel_closed():
    async with machines(LISTENER) as (listener,):
        _, writer = await open_proven_stream(listener)
        accepted = await listener.accept()
        writer.write(HEADER.pack(FRAME, 10) + b"half")
        writer.close()
        with pytest.raises(ChannelClosedError, match="ended the channel"):
            await asyncio.wait_for(accepted.receive(), 10)


@contextlib.asynccontextmanager
async def start_protocols(*transports: IrohTransport):
    protocols = [transport.add_protocol("test") for transport in transports]
    async with started(*transports):
        yield protocols


async def test_protocol_uses_tcp_where_the_peer_answers_there():
    transports = [IrohTransport(each.secret, "127.0.0.1") for each in (DIALLER, LISTENER)]
    async with start_protocols(*transports) as protocols:
        peer = Peer(key=LISTENER.key, addresses=transports[1].addresses())
        dialled = await protocols[0].connect(peer)
        accepted = await asyncio.wait_for(protocols[1].accept(), 10)
        assert isinstance(dialled, TlsChannel) and isinstance(accepted, TlsChannel)
        await dialled.send(b"weights")
        assert await accepted.receive() == b"weights"


async def test_protocol_uses_quic_where_the_tcp_port_is_taken(caplog, monkeypatch):
    monkeypatch.setattr(tls_endpoint, "TIMEOUTS", replace(TIMEOUTS, tls_connect_seconds=1.0))
    caplog.set_level(logging.WARNING, "barnraise")
    port = find_free_port()
    with socket.create_server(("127.0.0.1", port)):  # another program, which answers nothing
        transports = [
            IrohTransport(DIALLER.secret, "127.0.0.1"),
            IrohTransport(LISTENER.secret, "127.0.0.1", port),
        ]
        async with start_protocols(*transports) as protocols:
            assert "by UDP alone" in caplog.text
            peer = Peer(key=LISTENER.key, addresses=transports[1].addresses()[:1])
            dialled = await asyncio.wait_for(protocols[0].connect(peer), 20)
            assert isinstance(dialled, IrohChannel)
            await dialled.send(b"weights")
            accepted = await asyncio.wait_for(protocols[1].accept(), 10)
            assert await accepted.receive() == b"weights"
