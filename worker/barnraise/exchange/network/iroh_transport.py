"""Channels over QUIC, with iroh: peers are dialled by their Ed25519 key.

A frame on the wire is preceded by its length (4 bytes, big-endian).
"""

import asyncio
import contextlib
import ctypes
import logging

import iroh
from iroh import iroh_ffi

from barnraise.exchange.network.transport import Channel, ChannelClosedError
from barnraise.protocol.messages import MAX_FRAME, Peer

log = logging.getLogger("barnraise.exchange")

ALPN = b"barnraise/peer/1"
_PREFIX = 4  # bytes of the length before each frame
_AHEAD = (
    1 << 13
)  # bytes read at once: small frames come several in one call of iroh's, which cost more than they do
_HANDSHAKE = 15.0  # seconds a connection may take to stand
_WAITING = 64  # accepted channels nobody has asked for yet


def _write(self, value) -> None:
    """iroh 1.2.0's generated binding copies byte by byte in Python (3 MB/s); this is the same copy in one call."""
    data = bytes(value)
    with self._reserve(len(data)):
        ctypes.memmove(ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len, data, len(data))


# A test fails when a newer iroh makes this needless.
iroh_ffi._UniffiRustBufferBuilder.write = _write


class IrohTransport:
    """QUIC dialled by Ed25519 key. Relays are off: peers reach each other directly or through third peers."""

    def __init__(self, secret: bytes, host: str = "0.0.0.0", port: int = 0, patience: float = 10.0):
        """`secret` is the machine's Ed25519 secret. `host` 127.0.0.1 keeps to this machine; port 0 takes a free one.
        `patience`: seconds a dialled peer has to answer (left alone, iroh tries for 30)."""
        self._secret, self._host, self._port, self._patience = secret, host, port, patience
        self._endpoint: iroh.Endpoint | None = None
        self._opened: asyncio.Queue[_IrohChannel] = asyncio.Queue(_WAITING)
        self._tasks: set[asyncio.Task] = set()
        self.key = str(iroh.SecretKey.from_bytes(secret).public())

    async def start(self) -> None:
        at = f"{self._host}:{self._port}"
        both = (
            [at, "[::1]:0"] if self._host == "127.0.0.1" else [at]
        )  # unasked, iroh would listen on all of IPv6
        try:
            self._endpoint = await self._bind(both)
        except iroh.IrohError:
            try:  # a machine without IPv6, or the port is taken
                self._endpoint = await self._bind([at])
            except iroh.IrohError as error:
                raise OSError(f"cannot listen on {at}: {_said(error)}") from None
        self._spawn(self._listen())

    async def _bind(self, addresses: list[str]) -> iroh.Endpoint:
        builder = iroh.EndpointBuilder()
        builder.apply_minimal()
        builder.relay_mode(iroh.RelayMode.disabled())
        builder.secret_key(self._secret)
        builder.alpns([ALPN])
        for address in addresses:
            builder.bind_addr(address)
        return await builder.bind()

    def addresses(self) -> list[str]:
        return self._endpoint.addr().direct_addresses()[:8] if self._endpoint else []

    async def connect(self, peer: Peer) -> Channel:
        assert self._endpoint is not None
        try:
            where = iroh.EndpointAddr(
                iroh.EndpointId.from_string(peer.key), None, list(peer.addresses)
            )
            async with asyncio.timeout(self._patience):
                connection = await self._endpoint.connect(where, ALPN)
                return _IrohChannel(connection, await connection.open_bi())
        except (iroh.IrohError, TimeoutError) as error:
            raise ChannelClosedError(f"no answer from {peer.key[:8]}: {_said(error)}") from None

    async def accept(self) -> Channel:
        return await self._opened.get()

    async def _listen(self) -> None:
        while (incoming := await self._endpoint.accept_next()) is not None:
            self._spawn(self._welcome(incoming))

    async def _welcome(self, incoming: iroh.Incoming) -> None:
        """One handshake; a slow or silent dialler keeps nobody else waiting."""
        try:
            async with asyncio.timeout(_HANDSHAKE):
                connection = await (await incoming.accept()).connect()
                channel = _IrohChannel(connection, await connection.accept_bi())
        except (iroh.IrohError, TimeoutError) as error:
            log.info("a connection did not come to stand: %s", _said(error))
            return
        if self._opened.full():
            channel.close("too many connections at once")
        else:
            self._opened.put_nowait(channel)

    def _spawn(self, work) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self._endpoint is None:
            return
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._endpoint.close()


class _IrohChannel:
    def __init__(self, connection: iroh.Connection, stream: iroh.BiStream):
        self._connection = connection
        self._in, self._out = stream.recv(), stream.send()
        self._ahead = b""  # read, and not yet received
        self.peer = str(connection.remote_id())
        self.bytes_sent = self.bytes_received = 0

    async def send(self, frame: bytes) -> None:
        assert len(frame) <= MAX_FRAME
        try:
            await self._out.write_all(len(frame).to_bytes(_PREFIX, "big") + frame)
        except iroh.IrohError as error:
            raise ChannelClosedError(self._why(error)) from None
        self.bytes_sent += _PREFIX + len(frame)

    async def receive(self) -> bytes:
        try:
            length = int.from_bytes(await self._take(_PREFIX), "big")
            if length > MAX_FRAME:
                self.close(f"a frame of {length} bytes; at most {MAX_FRAME} are allowed")
                log.warning("dropped %s: it announced a frame of %d bytes", self.peer[:8], length)
                raise ChannelClosedError(f"it announced a frame of {length} bytes")
            frame = await self._take(length)
        except iroh.IrohError as error:
            raise ChannelClosedError(self._why(error)) from None
        self.bytes_received += _PREFIX + length
        return frame

    async def _take(self, size: int) -> bytes:
        """The next so many bytes of the stream. Raises IrohError, and ChannelClosed where it ends before."""
        while (missing := size - len(self._ahead)) > 0:
            more = await (
                self._in.read_exact(missing) if missing > _AHEAD else self._in.read(_AHEAD)
            )
            if not more:
                raise ChannelClosedError(self._connection.close_reason() or "it sends no more")
            self._ahead += more
        taken, self._ahead = self._ahead[:size], self._ahead[size:]
        return taken

    def close(self, reason: str) -> None:
        with contextlib.suppress(iroh.IrohError):  # it may be closed already
            self._connection.close(0, reason.encode()[:200])

    def _why(self, error: iroh.IrohError) -> str:
        return self._connection.close_reason() or _said(error)


def _said(error: Exception) -> str:
    """The cause: iroh's text ends with it, after where in its own source each layer met it."""
    if not isinstance(error, iroh.IrohError):
        return "it took too long"
    return error.message().strip().rpartition("\n")[2].strip()
