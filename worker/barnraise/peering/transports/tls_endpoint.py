"""Listen for TLS connections of other machines, and dial theirs. See `tls_channel.py`.

It listens on the TCP port of the same number as the QUIC endpoint's UDP port, so a machine is
dialled at the addresses that others know already.
"""

import asyncio
import logging
import socket
import ssl
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from weakref import WeakSet

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from barnraise.errors import MessageError
from barnraise.peering.addresses.addresses import host_of, join_address, port_of, version_of
from barnraise.peering.limits.incoming_limits import IncomingLimits, groups_of
from barnraise.peering.limits.repeated_warnings import RepeatedWarnings
from barnraise.peering.limits.service_limits import Service
from barnraise.peering.limits.timeouts import TIMEOUTS
from barnraise.peering.transports.tls_channel import READ_BYTES, TlsChannel, peer_certificate
from barnraise.peering.transports.transport import ChannelClosedError
from barnraise.protocol.messages import Peer
from barnraise.protocol.mirror_list import is_relay_url
from barnraise.protocol.signing import Identity, digest

log = logging.getLogger("barnraise.exchange")

BACKLOG = 64  # connections that the kernel holds until they are accepted
ACCEPT_RETRY_SECONDS = 1.0  # after a connection could not be accepted, as for want of files
# Of a certificate, which lasts for one start; nobody checks the times.
VALID = datetime(2020, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)


class TlsEndpoint:
    """Open and accept TLS channels of some protocols."""

    def __init__(self, identity: Identity, on_channel: Callable[[bytes, TlsChannel], None]) -> None:
        """Prepare an endpoint; `listen` opens its sockets.

        `on_channel` receives the protocol and the channel that another machine opened.
        """
        self._identity = identity
        self._on_channel = on_channel
        self._protocols: list[bytes] = []
        self._listeners: list[socket.socket] = []
        self._limits: IncomingLimits[asyncio.Task[None]] = IncomingLimits(Service.TLS_CONNECTIONS)
        self._repeats = RepeatedWarnings()
        self._tasks: set[asyncio.Task[None]] = set()
        self._channels: WeakSet[TlsChannel] = WeakSet()

    def add_protocol(self, name: bytes) -> None:
        """Accept channels of another protocol. Call it before `listen`."""
        self._protocols.append(name)

    @property
    def pending_connections(self) -> int:
        """Count the incoming connections that are being established."""
        return len(self._limits.pending)

    def listen(self, addresses: Sequence[str]) -> None:
        """Listen on some of this machine's addresses, host:port, if a protocol was added.

        Raises:
            OSError: A port is in use.
        """
        if not self._protocols:
            return
        try:
            for address in addresses:
                listener = socket.create_server(
                    (host_of(address), port_of(address)),
                    family=socket.AF_INET6 if version_of(address) == 6 else socket.AF_INET,
                    backlog=BACKLOG,
                )
                listener.setblocking(False)
                self._listeners.append(listener)
        except OSError:
            self._close_listeners()
            raise
        certificate, context = _create_server_context(self._protocols)
        for listener in self._listeners:
            self._spawn(self._accept_connections(listener, certificate, context))

    async def connect(self, protocol: bytes, peer: Peer) -> TlsChannel:
        """Dial a machine at all of its addresses; the first one at which it proves its key counts.

        Raises:
            ChannelClosedError: No machine with that key answers by TCP.
        """
        addresses = [address for address in peer.addresses if not is_relay_url(address)]
        opened: list[socket.socket] = []
        dials = [asyncio.create_task(_open_socket(address, opened)) for address in addresses]
        reason = "it took too long"
        try:
            async with asyncio.timeout(TIMEOUTS.tls_connect_seconds):
                for dial in asyncio.as_completed(dials):
                    try:
                        connection, address = await dial
                        opened.remove(connection)
                        return await self._greet_listener(connection, address, protocol, peer.key)
                    except (OSError, MessageError) as error:
                        reason = str(error) or reason
        except TimeoutError as error:
            reason = str(error) or reason
        finally:
            for dial in dials:
                dial.cancel()
            await asyncio.gather(*dials, return_exceptions=True)
            for connection in opened:
                connection.close()
        raise ChannelClosedError(f"no answer from {peer.key[:8]} by TCP: {reason}")

    async def _greet_listener(
        self, connection: socket.socket, address: str, protocol: bytes, key: str
    ) -> TlsChannel:
        """Return a channel over an open socket, to a machine that has proven its key.

        Raises:
            OSError: The connection failed, or took too long.
            MessageError: The machine did not prove that it has the key.
        """
        reader, writer = await asyncio.open_connection(
            sock=connection,
            ssl=_create_client_context(protocol),
            server_hostname="",
            limit=READ_BYTES,
            ssl_handshake_timeout=TIMEOUTS.tls_handshake_seconds,
            ssl_shutdown_timeout=TIMEOUTS.tls_goodbye_seconds,
        )
        channel = TlsChannel(reader, writer, address)
        try:
            await channel.prove_keys(self._identity, digest(peer_certificate(writer)), key)
        finally:
            if not channel.peer:
                channel.close("the key was not proven")
        self._channels.add(channel)
        return channel

    async def _accept_connections(
        self, listener: socket.socket, certificate: str, context: ssl.SSLContext
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (host, *_) = await loop.sock_accept(listener)
            except OSError as error:
                self._repeats.warn("accept", "cannot accept a TCP connection: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            address = join_address(host_of(join_address(host, 0)), 0)  # ports differ each time
            if not self._limits.try_connect(address, loop.time()):
                connection.close()
                self._repeats.warn(address, "refused TCP connections from %s: too many", host)
                continue
            task = self._spawn(self._accept_connection(connection, certificate, context))
            task.add_done_callback(self._limits.pending.discard)
            for oldest in self._limits.pending.add(task, groups_of(address)):
                oldest.cancel()

    async def _accept_connection(
        self, connection: socket.socket, certificate: str, context: ssl.SSLContext
    ) -> None:
        """Finish one handshake, in a task of its own so that a slow dialler delays nobody."""
        try:
            protocol, channel = await self._greet_dialler(connection, certificate, context)
        except (OSError, MessageError) as error:
            reason = str(error) or "it took too long"
            self._repeats.warn("proof", "an incoming TCP connection was refused: %s", reason)
            return
        self._channels.add(channel)
        self._on_channel(protocol, channel)

    async def _greet_dialler(
        self, connection: socket.socket, certificate: str, context: ssl.SSLContext
    ) -> tuple[bytes, TlsChannel]:
        """Return the protocol and the channel of a machine that has proven its key.

        Raises:
            OSError: The connection failed, or took too long.
            MessageError: The machine did not prove that it has the key.
        """
        reader, writer = await _wrap_accepted(connection, context)
        channel = TlsChannel(reader, writer, "")
        try:
            protocol = writer.get_extra_info("ssl_object").selected_alpn_protocol()
            if protocol is None:
                raise MessageError("it speaks none of this machine's protocols")
            await channel.prove_keys(self._identity, certificate)
        finally:
            if not channel.peer:
                channel.close("prove your key sooner")
        return protocol.encode(), channel

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []

    async def close(self) -> None:
        """Stop listening and close every channel."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._close_listeners()
        channels = list(self._channels)
        for channel in channels:
            channel.close("the machine stops")
        await asyncio.gather(*(channel.wait_closed() for channel in channels))


async def _open_socket(address: str, opened: list[socket.socket]) -> tuple[socket.socket, str]:
    """Open a TCP connection, and add it to those that are opened.

    Raises:
        OSError: Nobody answers there.
    """
    family = socket.AF_INET6 if version_of(address) == 6 else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        async with asyncio.timeout(TIMEOUTS.tcp_connect_seconds):
            target = host_of(address), port_of(address)
            await asyncio.get_running_loop().sock_connect(connection, target)
    except BaseException:
        connection.close()
        raise
    opened.append(connection)
    return connection, address


async def _wrap_accepted(
    connection: socket.socket, context: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Do TLS's handshake with a machine that has connected.

    Raises:
        OSError: It failed, or took too long.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(READ_BYTES, loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol,
        connection,
        ssl=context,
        ssl_handshake_timeout=TIMEOUTS.tls_handshake_seconds,
        ssl_shutdown_timeout=TIMEOUTS.tls_goodbye_seconds,
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _create_client_context(protocol: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    # Nobody has signed the certificate: `TlsChannel.prove_keys` checks its digest and both keys.
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([protocol.decode()])
    return context


def _create_server_context(protocols: Sequence[bytes]) -> tuple[str, ssl.SSLContext]:
    """Return the digest of a new certificate, and a context that shows it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "barnraise")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(VALID[0])
        .not_valid_after(VALID[1])
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([protocol.decode() for protocol in protocols])
    with tempfile.TemporaryDirectory() as folder:  # Python loads certificates from files only
        path = Path(folder, "certificate.pem")
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        context.load_cert_chain(path)
    return digest(certificate.public_bytes(serialization.Encoding.DER)), context
