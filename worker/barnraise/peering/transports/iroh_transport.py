"""Carry frames over QUIC with iroh: peers are dialled by their Ed25519 key.

A frame on the wire is preceded by its length (4 bytes, big-endian).
"""

import asyncio
import contextlib
import gc
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import iroh

from barnraise.peering.addresses.addresses import network_of, port_of, version_of
from barnraise.peering.addresses.local_addresses import LocalAddresses
from barnraise.peering.addresses.port_mapping import find_home_network, remove_iroh_mapping
from barnraise.peering.limits.incoming_limits import IncomingLimits, groups_of
from barnraise.peering.limits.repeated_warnings import RepeatedWarnings
from barnraise.peering.limits.service_limits import Service
from barnraise.peering.limits.timeouts import TIMEOUTS
from barnraise.peering.transports import iroh_binding  # noqa: F401  (it replaces two functions)
from barnraise.peering.transports.tls_endpoint import TlsEndpoint
from barnraise.peering.transports.transport import Channel, ChannelClosedError
from barnraise.protocol.messages import MAX_FRAME_BYTES, Peer
from barnraise.protocol.mirror_list import DEFAULT_RELAYS, is_allowed_relay, is_relay_url
from barnraise.protocol.signing import Identity
from barnraise.protocol.types import MAX_ADDRESSES

log = logging.getLogger("barnraise.exchange")

ALPN = b"barnraise/peer/1"  # of channels that no protocol is named for
PROBE_ALPN = b"barnraise/probe/1"  # of a connection that only shows that it can be made
ANY_HOST = "0.0.0.0"
FREE_PORT_TRIES = 8
RELEASE_TRIES, RELEASE_SECONDS = 50, 0.1  # attempts to bind a port, and the pause between two
_LENGTH_BYTES = 4  # the length before each frame
# Small frames are read several at once: a call into iroh costs more than copying this many bytes.
_READ_AHEAD_BYTES = 1 << 13
_MAX_UNACCEPTED = 64  # incoming channels that wait for `accept`
_PACKET_BYTES = 28  # of IPv4 and UDP, before each packet


class IrohTransport:
    """Dial and accept QUIC connections by Ed25519 key.

    Relays are off until `set_relays`: peers reach each other directly, and updates reach the others
    through a third peer. What goes through a relay is encrypted from end to end, as all is.
    """

    def __init__(
        self, secret: bytes, host: str = ANY_HOST, port: int = 0, dial_timeout: float = 10.0
    ) -> None:
        """Prepare an endpoint; `start` makes it listen.

        Args:
            secret: The machine's Ed25519 secret key, 32 bytes.
            host: The address to listen on; 127.0.0.1 accepts only peers on this machine, and
                ANY_HOST those of all networks, over IPv4 and IPv6.
            port: The UDP port; 0 chooses a free one.
            dial_timeout: Seconds in which a dialled peer must answer (iroh's own limit is 30).
        """
        self._secret = secret
        self._host = host
        self._port = port
        self._dial_timeout = dial_timeout
        self._endpoint: iroh.Endpoint | None = None
        self._ports: dict[int, int] = {}  # version of IP → port
        self._local = LocalAddresses()
        self._relays: tuple[str, ...] = ()
        # ALPN → channels of that protocol that wait for `accept`
        self._incoming: dict[bytes, asyncio.Queue[Channel]] = {ALPN: asyncio.Queue(_MAX_UNACCEPTED)}
        self._tls = TlsEndpoint(Identity(secret), self._offer)
        self._limits: IncomingLimits[asyncio.Task[None]] = IncomingLimits(Service.QUIC_CONNECTIONS)
        self._repeats = RepeatedWarnings()
        self._tasks: set[asyncio.Task] = set()
        self.probes_received = 0
        self.key = str(iroh.SecretKey.from_bytes(secret).public())

    async def start(self) -> None:
        """Listen; see `Transport.start`."""
        self._endpoint = await self._listen()
        for bound in self._endpoint.bound_sockets():
            self._ports[version_of(bound)] = port_of(bound)
        self._spawn(self._accept_connections(self._endpoint))
        try:
            self._tls.listen(self._endpoint.bound_sockets())
        except OSError as error:
            log.warning("peers in this network connect by UDP alone, which is slower: %s", error)

    async def _listen(self) -> iroh.Endpoint:
        """Bind the sockets.

        Raises:
            OSError: When the port is in use, or the address is not of this machine.
        """
        port = self._port
        if self._host == ANY_HOST and not port:
            port = find_free_port()
        address = f"{self._host}:{port}"
        # Without an IPv6 address of ours iroh would listen on all of them, on another port.
        ipv6 = {"127.0.0.1": "[::1]:0", ANY_HOST: f"[::]:{port}"}.get(self._host)
        alpns = [*self._incoming, PROBE_ALPN]
        try:
            return await _bind([address, ipv6] if ipv6 else [address], self._secret, alpns)
        except iroh.IrohError:
            try:  # this machine may have no IPv6; or the port is in use
                return await _bind([address], self._secret, alpns)
            except iroh.IrohError as error:
                raise OSError(f"cannot listen on {address}: {_format_cause(error)}") from None

    def addresses(self) -> list[str]:
        """Return host:port pairs of this machine's own, at most 16, the most useful first."""
        if self._endpoint is None:
            return []
        if self._host != ANY_HOST:
            return self._endpoint.addr().direct_addresses()[:MAX_ADDRESSES]
        relay = self._endpoint.addr().relay_url() if self._relays else None
        local = self._local.list_addresses(self._ports)[: MAX_ADDRESSES - 1]
        return [*local, relay] if relay else local

    async def set_relays(self, relays: Sequence[str]) -> None:
        """Replace the relays; see `Transport.set_relays`."""
        if self._endpoint is None or self._host != ANY_HOST:
            return
        urls = tuple(dict.fromkeys(url for relay in relays for url in _expand_relay(relay)))
        for url in set(self._relays) - set(urls):
            await self._endpoint.remove_relay(url)
        for url in set(urls) - set(self._relays):
            try:
                await self._endpoint.insert_relay(iroh.RelayConfig(url=url))
            except iroh.IrohError as error:
                log.warning("the relay %s cannot be used: %s", url, _format_cause(error))
        self._relays = urls

    @property
    def mappable_port(self) -> int:
        """The IPv4 port, where this machine listens on all networks; see `Transport`."""
        return self._ports.get(4, 0) if self._host == ANY_HOST else 0

    def add_protocol(self, name: str) -> "IrohProtocol":
        """Add a protocol; see `Transport.add_protocol`."""
        assert self._endpoint is None, "protocols are added before `start`"
        alpn = f"barnraise/{name}/1".encode()
        self._incoming[alpn] = asyncio.Queue(_MAX_UNACCEPTED)
        self._tls.add_protocol(alpn)
        return IrohProtocol(self, self._tls, alpn)

    async def connect(self, peer: Peer) -> Channel:
        """Dial a peer; see `Transport.connect`."""
        return await self.connect_for(ALPN, peer)

    async def connect_for(self, alpn: bytes, peer: Peer) -> Channel:
        """Dial a peer for a protocol, by its ALPN; see `Transport.connect`."""
        assert self._endpoint is not None
        try:
            direct = [address for address in peer.addresses if not is_relay_url(address)]
            relay = next(
                (url for url in peer.addresses if is_allowed_relay(url, self._relays)), None
            )
            address = iroh.EndpointAddr(iroh.EndpointId.from_string(peer.key), relay, direct)
            async with asyncio.timeout(self._dial_timeout):
                connection = await self._endpoint.connect(address, alpn)
                return IrohChannel(connection, await connection.open_bi())
        except (iroh.IrohError, TimeoutError) as error:
            raise ChannelClosedError(
                f"no answer from {peer.key[:8]}: {_format_cause(error)}"
            ) from None

    async def probe(self, peer: Peer) -> bool:
        """Dial a peer as a stranger; see `Transport.probe`."""
        own = {"127.0.0.1": ["127.0.0.1:0", "[::1]:0"], ANY_HOST: ["0.0.0.0:0", "[::]:0"]}
        wanted = own.get(self._host, [f"{self._host}:0"])
        bound = [address for address in wanted if version_of(address) in self._ports] or wanted
        try:
            endpoint = await _bind(bound, os.urandom(32), [])
        except iroh.IrohError as error:
            log.debug("no socket for a probe: %s", _format_cause(error))
            return False
        try:
            address = iroh.EndpointAddr(
                iroh.EndpointId.from_string(peer.key), None, list(peer.addresses)
            )
            async with asyncio.timeout(TIMEOUTS.quic_probe_seconds):
                connection = await endpoint.connect(address, PROBE_ALPN)
                await connection.closed()  # by the peer, once it has counted the probe
        except (iroh.IrohError, TimeoutError) as error:
            log.debug("a probe of %s was not answered: %s", peer.key[:8], _format_cause(error))
            return False
        finally:
            self._spawn(_close_probe(endpoint, self._host == ANY_HOST))
        return True

    @property
    def pending_connections(self) -> int:
        """Count the incoming connections that are being established."""
        return len(self._limits.pending)

    async def accept(self) -> Channel:
        """Return the next channel that another peer opened."""
        return await self.accept_for(ALPN)

    async def accept_for(self, alpn: bytes) -> Channel:
        """Return the next channel that another peer opened for a protocol, by its ALPN."""
        return await self._incoming[alpn].get()

    async def _accept_connections(self, endpoint: iroh.Endpoint) -> None:
        """Accept connections, a bounded number for each address and network.

        While many are pending, an address proves first that it receives what is sent to it (QUIC's
        Retry): a false sender address then costs nothing and takes nobody's place.
        """
        while (incoming := await endpoint.accept_next()) is not None:
            address = await _sender_address(incoming)
            is_validated = await incoming.remote_addr_validated()
            now = asyncio.get_running_loop().time()
            if self._limits.is_busy and not is_validated:
                await _end_incoming(incoming.retry)
            elif not self._limits.try_connect(address, now, is_validated):
                network = network_of(address)
                self._repeats.warn(network, "ignored connections from %s: too many", network)
                await _end_incoming(incoming.ignore)
            else:
                task = self._spawn(self._accept_connection(incoming))
                task.add_done_callback(self._limits.pending.discard)
                for oldest in self._limits.pending.add(task, groups_of(address)):
                    oldest.cancel()

    async def _accept_connection(self, incoming: iroh.Incoming) -> None:
        """Finish one QUIC handshake, in a task of its own so that a slow dialler delays nobody."""
        connection: iroh.Connection | None = None
        channel: IrohChannel | None = None
        try:
            async with asyncio.timeout(TIMEOUTS.quic_handshake_seconds):
                connection = await (await incoming.accept()).connect()
            if connection.alpn() == PROBE_ALPN:
                self.probes_received += 1
                connection.close(0, b"reached")
                return
            async with asyncio.timeout(TIMEOUTS.quic_stream_seconds):
                channel = IrohChannel(connection, await connection.accept_bi())
        except (iroh.IrohError, TimeoutError) as error:
            self._repeats.warn(
                "not established",
                "an incoming connection was not established: %s",
                _format_cause(error),
            )
        finally:
            if connection is not None and channel is None:
                with contextlib.suppress(iroh.IrohError):  # it may be closed already
                    connection.close(0, b"open a stream sooner")
        if channel is None:
            return
        assert connection is not None
        self._offer(bytes(connection.alpn()), channel)

    def _offer(self, alpn: bytes, channel: Channel) -> None:
        """Pass an incoming channel to `accept`."""
        incoming_channels = self._incoming[alpn]
        if incoming_channels.full():
            channel.close("too many connections at once")
        else:
            incoming_channels.put_nowait(channel)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Stop listening and close every channel."""
        if self._endpoint is None:
            return
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._tls.close()
        await self._endpoint.close()


class IrohProtocol:
    """Open and accept the channels of one protocol of an endpoint that others use too.

    Its channels go over TLS and TCP where the peer answers there, as in one LAN or cluster, and
    over QUIC elsewhere.
    """

    def __init__(self, transport: IrohTransport, tls: TlsEndpoint, alpn: bytes) -> None:
        """Use the endpoints of a transport, which its owner starts and closes."""
        self._transport = transport
        self._tls = tls
        self._alpn = alpn
        self.key = transport.key

    async def connect(self, peer: Peer) -> Channel:
        """Dial a peer; see `Transport.connect`."""
        try:
            return await self._tls.connect(self._alpn, peer)
        except ChannelClosedError as error:
            log.debug("%s", error)
            return await self._transport.connect_for(self._alpn, peer)

    async def accept(self) -> Channel:
        """Return the next channel that another peer opened for this protocol."""
        return await self._transport.accept_for(self._alpn)


class IrohChannel:
    """Carry frames over one bidirectional QUIC stream."""

    def __init__(self, connection: iroh.Connection, stream: iroh.BiStream) -> None:
        """Use `stream`, the connection's only one."""
        self._connection = connection
        self._receive_stream = stream.recv()
        self.send_stream = stream.send()
        self._read_ahead = b""  # read from the stream and not returned yet
        self.peer = str(connection.remote_id())
        self.remote_address = _remote_address(connection)

    @property
    def bytes_sent(self) -> int:
        """All bytes of the connection's packets: frames, acknowledgements, what is sent again."""
        stats = self._connection.stats()
        return stats.udp_tx_bytes + _PACKET_BYTES * stats.udp_tx_datagrams

    @property
    def bytes_received(self) -> int:
        """All bytes of the packets that have arrived."""
        stats = self._connection.stats()
        return stats.udp_rx_bytes + _PACKET_BYTES * stats.udp_rx_datagrams

    def refresh_remote_address(self) -> bool:
        """Look up the address; see `Channel.refresh_remote_address`."""
        address = _remote_address(self._connection)
        if not address or address == self.remote_address:
            return False
        self.remote_address = address
        return True

    @property
    def is_relayed(self) -> bool:
        """Whether the selected path leads through a relay; see `Channel`."""
        return any(path.is_relay for path in self._connection.paths() if path.is_selected)

    async def send(self, frame: bytes) -> None:
        """Send a frame; see `Channel.send`."""
        assert len(frame) <= MAX_FRAME_BYTES
        try:
            await self.send_stream.write_all(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)
        except iroh.IrohError as error:
            raise ChannelClosedError(self._close_reason(error)) from None

    async def receive(self) -> bytes:
        """Return the next frame; see `Channel.receive`."""
        try:
            length = int.from_bytes(await self._read(_LENGTH_BYTES), "big")
            if length > MAX_FRAME_BYTES:
                self.close(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
                log.warning("dropped %s: it announced a frame of %d bytes", self.peer[:8], length)
                raise ChannelClosedError(f"it announced a frame of {length} bytes")
            frame = await self._read(length)
        except iroh.IrohError as error:
            raise ChannelClosedError(self._close_reason(error)) from None
        return frame

    async def _read(self, size: int) -> bytes:
        """Return the next `size` bytes of the stream.

        Raises:
            iroh.IrohError: When the connection failed.
            ChannelClosedError: When the stream ended before.
        """
        while (missing := size - len(self._read_ahead)) > 0:
            if missing > _READ_AHEAD_BYTES:
                data = await self._receive_stream.read_exact(missing)
            else:
                data = await self._receive_stream.read(_READ_AHEAD_BYTES)
            if not data:
                raise ChannelClosedError(
                    self._connection.close_reason() or "the peer ended the channel"
                )
            self._read_ahead += data
        data = self._read_ahead[:size]
        self._read_ahead = self._read_ahead[size:]
        return data

    def close(self, reason: str) -> None:
        """End the channel; see `Channel.close`."""
        with contextlib.suppress(iroh.IrohError):  # it may be closed already
            self._connection.close(0, reason.encode()[:200])

    def _close_reason(self, error: iroh.IrohError) -> str:
        return self._connection.close_reason() or _format_cause(error)


async def _bind(addresses: list[str], secret: bytes, alpns: list[bytes]) -> iroh.Endpoint:
    """Bind sockets of a key, which accept connections for some protocols.

    Raises:
        iroh.IrohError: An address cannot be bound.
    """
    builder = iroh.EndpointBuilder()
    builder.apply_minimal()
    # Without a relay nothing is sent; `disabled` would allow none later.
    builder.relay_mode(iroh.RelayMode.custom(iroh.RelayMap.empty()))
    builder.secret_key(secret)
    builder.alpns(alpns)
    for address in addresses:
        builder.bind_addr(address)
    return await builder.bind()


def _expand_relay(relay: str) -> list[str]:
    """Return a relay's URL, or those of the public relays for which "default" stands."""
    if relay != DEFAULT_RELAYS:
        return [relay]
    return iroh.RelayMode.default_mode().relay_map().urls()


def find_free_port() -> int:
    """Return a UDP port that is free for IPv4 and IPv6; 0 when none is found.

    One port for both is one rule in a router, and one number for a person to remember.
    """
    for _ in range(FREE_PORT_TRIES):
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ipv4:
                ipv4.bind(("", 0))
                port = ipv4.getsockname()[1]
                with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as ipv6:
                    ipv6.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    ipv6.bind(("", port))
        except OSError:  # the port is taken for IPv6, or there is no IPv6
            continue
        return port
    return 0


async def _sender_address(incoming: iroh.Incoming) -> str:
    """Return the host:port that an incoming connection says it is from."""
    address = await incoming.remote_addr()
    return str(getattr(address, "addr", "relay"))  # a relayed connection has no address


async def _close_probe(endpoint: iroh.Endpoint, may_be_mapped: bool) -> None:
    """Close a probe's sockets, and remove what iroh's binding had a router forward to them."""
    ports = [port_of(bound) for bound in endpoint.bound_sockets() if not bound.startswith("[")]
    await endpoint.close()
    if may_be_mapped and ports and await asyncio.to_thread(find_home_network) is not None:
        await asyncio.to_thread(remove_iroh_mapping, ports[0])


async def _end_incoming(end: Callable[[], Awaitable[None]]) -> None:
    with contextlib.suppress(iroh.IrohError):  # the other side may have given up
        await end()


def _remote_address(connection: iroh.Connection) -> str:
    """Return the host:port from which the peer sends; empty if no direct path is known."""
    paths = sorted(connection.paths(), key=lambda path: not path.is_selected)
    return next((path.remote_addr for path in paths if path.is_ip), "")


def _format_cause(error: Exception) -> str:
    """Return an error's cause in one line.

    The last line of iroh's text is the cause; those before it name the layers of its source.
    """
    if not isinstance(error, iroh.IrohError):
        return "it took too long"
    return error.message().strip().rpartition("\n")[2].strip()


def wait_until_free(port: int) -> None:
    """Wait for a few seconds until a closed transport has released a UDP port.

    iroh releases it with the last reference to its endpoint, also from a channel.
    """
    for _ in range(RELEASE_TRIES):
        gc.collect()
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.bind(("", port))
            return
        time.sleep(RELEASE_SECONDS)
