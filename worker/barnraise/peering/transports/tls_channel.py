"""Carry frames over TLS and TCP, for networks where machines reach each other by TCP.

In a LAN or a cluster this takes less CPU time than QUIC through iroh's Python binding: 9 ms less
for a step that sends and receives 0.9 MB (docs/benchmarks/exchange.md).

A frame on the wire is preceded by its kind (1 byte) and its length (4 bytes, big-endian). TLS 1.3
encrypts the connection; the listening machine creates a certificate at each start. Both machines
prove their keys in the first frames: each one chooses a nonce, and signs the other one's nonce and
key together with the certificate's digest. A machine between them would have another certificate.
"""

import asyncio
import contextlib
import secrets
import ssl
import struct
from enum import IntEnum
from typing import TypeVar

from pydantic import ValidationError

from barnraise.errors import MessageError
from barnraise.peering.limits.timeouts import TIMEOUTS
from barnraise.peering.transports.transport import MAX_REASON, ChannelClosedError
from barnraise.protocol.messages import MAX_FRAME_BYTES, ChannelGreeting, ChannelProof, Signed
from barnraise.protocol.signing import Identity, open_signed
from barnraise.protocol.types import Message

MAX_GREETING_BYTES = 4096  # of one frame until then
READ_BYTES = 1 << 18  # read at once; as many may wait to be read, and to be sent
_HEADER = struct.Struct(">BI")  # kind, length

Body = TypeVar("Body", bound=Message)


class _Kind(IntEnum):
    """What follows a header."""

    FRAME = 0
    KEEP_ALIVE = 1  # nothing
    GOODBYE = 2  # why the channel ends, in UTF-8


class TlsChannel:
    """Carry frames over one TLS connection; see `transport.Channel`."""

    is_relayed = False

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, remote_address: str
    ) -> None:
        """Use a connection whose TLS handshake is done; `prove_keys` comes first.

        `remote_address` is the host:port that was dialled; "" for a channel that was accepted,
        whose other end listens on another port.
        """
        self._reader = reader
        self._writer = writer
        self._read_ahead = bytearray()  # read from the connection and not returned yet
        self._close_reason = ""
        self._keep_alive: asyncio.Task[None] | None = None
        self.peer = ""
        self.remote_address = remote_address
        self.bytes_sent = 0
        self.bytes_received = 0
        writer.transport.set_write_buffer_limits(high=READ_BYTES)

    async def prove_keys(
        self, identity: Identity, certificate: str, dialled: str | None = None
    ) -> None:
        """Prove this machine's key to the other one, and check the other one's.

        Args:
            identity: This machine's.
            certificate: Digest of the certificate that the listening machine showed.
            dialled: The key that was dialled; None at the listening end.

        Raises:
            MessageError: The other machine did not prove a key, or it is not the one dialled.
            ChannelClosedError: The channel ended.
            TimeoutError: The other machine did not prove its key in time.
        """
        own_kind, other_kind = "tls-listener", "tls-dialler"
        if dialled is not None:
            own_kind, other_kind = other_kind, own_kind
        nonce = secrets.token_hex(32)
        async with asyncio.timeout(TIMEOUTS.tls_proof_seconds):
            await self._send_message(ChannelGreeting(key=identity.key, nonce=nonce))
            greeting = await self._receive_message(ChannelGreeting)
            if dialled is not None and greeting.key != dialled:
                raise MessageError(f"{greeting.key[:8]} answered in place of {dialled[:8]}")
            proof = ChannelProof(certificate=certificate, peer=greeting.key, nonce=greeting.nonce)
            await self._send_message(identity.sign(own_kind, proof))
            signed = await self._receive_message(Signed)
        proven = open_signed(signed, other_kind, ChannelProof, greeting.key)
        expected = ChannelProof(certificate=certificate, peer=identity.key, nonce=nonce)
        if proven != expected:
            raise MessageError(f"{greeting.key[:8]} did not prove its key for this connection")
        self.peer = greeting.key
        self._keep_alive = asyncio.create_task(self._show_presence())

    async def _send_message(self, message: Message) -> None:
        await self.send(message.model_dump_json().encode())

    async def _receive_message(self, shape: type[Body]) -> Body:
        frame = await self.receive()
        try:
            return shape.model_validate_json(frame)
        except ValidationError:
            raise MessageError(f"it did not introduce itself with a {shape.__name__}") from None

    def refresh_remote_address(self) -> bool:
        """Return False: a TCP connection ends when an address changes."""
        return False

    async def send(self, frame: bytes) -> None:
        """Send a frame; see `Channel.send`."""
        assert len(frame) <= MAX_FRAME_BYTES
        if self._close_reason:
            raise ChannelClosedError(self._close_reason)
        try:
            self._writer.write(_HEADER.pack(_Kind.FRAME, len(frame)) + frame)
            await self._writer.drain()
        except OSError as error:
            raise ChannelClosedError(self._end(f"the connection has ended: {error}")) from None
        self.bytes_sent += _HEADER.size + len(frame)

    async def receive(self) -> bytes:
        """Return the next frame; see `Channel.receive`."""
        while True:
            kind, length = _HEADER.unpack(await self._read(_HEADER.size))
            self.bytes_received += _HEADER.size + length
            match kind:
                case _Kind.FRAME:
                    limit = MAX_FRAME_BYTES if self.peer else MAX_GREETING_BYTES
                    if length > limit:
                        self.close(f"a frame of {length} bytes; at most {limit} are allowed")
                        raise ChannelClosedError(f"it announced a frame of {length} bytes")
                    return await self._read(length)
                case _Kind.KEEP_ALIVE if length == 0:
                    continue
                case _Kind.GOODBYE if length <= MAX_REASON:
                    reason = (await self._read(length)).decode(errors="replace")
                    raise ChannelClosedError(self._end(reason))
                case _:
                    self.close("a frame of a kind that does not exist")
                    raise ChannelClosedError("it sent a frame of a kind that does not exist")

    async def _read(self, size: int) -> bytes:
        """Return the next `size` bytes of the connection.

        Raises:
            ChannelClosedError: When the connection has ended, or nothing came for long.
        """
        while len(self._read_ahead) < size:
            try:
                async with asyncio.timeout(TIMEOUTS.silence_seconds):
                    data = await self._reader.read(READ_BYTES)
            except TimeoutError:
                reason = f"nothing was received for {TIMEOUTS.silence_seconds:.0f} s"
                self.close(reason)
                raise ChannelClosedError(reason) from None
            except OSError as error:
                raise ChannelClosedError(self._end(f"the connection has ended: {error}")) from None
            if not data:
                raise ChannelClosedError(self._end("the peer ended the channel"))
            self._read_ahead += data
        with memoryview(self._read_ahead) as view:
            data = bytes(view[:size])
        del self._read_ahead[:size]
        return data

    async def _show_presence(self) -> None:
        """Send a few bytes from time to time, so that silence means that a machine is gone."""
        with contextlib.suppress(OSError):
            while True:
                await asyncio.sleep(TIMEOUTS.keep_alive_seconds)
                if not self._writer.transport.get_write_buffer_size():  # else bytes are on the way
                    self._writer.write(_HEADER.pack(_Kind.KEEP_ALIVE, 0))

    def close(self, reason: str) -> None:
        """End the channel; see `Channel.close`."""
        if not self._close_reason:
            text = reason.encode()[:MAX_REASON]
            with contextlib.suppress(OSError):
                self._writer.write(_HEADER.pack(_Kind.GOODBYE, len(text)) + text)
        self._end(reason)

    def _end(self, reason: str) -> str:
        """End the connection, if it has not ended; return the first reason why it did."""
        if not self._close_reason:
            self._close_reason = reason or "the channel has ended"
            if self._keep_alive is not None:
                self._keep_alive.cancel()
            self._writer.close()
            # What the other side does not read must not stay in memory.
            asyncio.get_running_loop().call_later(
                TIMEOUTS.close_seconds, self._writer.transport.abort
            )
        return self._close_reason

    async def wait_closed(self) -> None:
        """Wait until a channel that was closed has freed its connection."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def peer_certificate(writer: asyncio.StreamWriter) -> bytes:
    """Return the certificate that the listening machine showed, in DER; b"" if it showed none."""
    connection: ssl.SSLObject = writer.get_extra_info("ssl_object")
    return connection.getpeercert(binary_form=True) or b""
