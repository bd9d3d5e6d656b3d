"""Connect peers in memory: a test double of `transport.Transport`.

No product code uses it. It simulates bandwidth, delay, loss and partitions. Like QUIC it delivers
whole frames in order: a lost frame is sent again and arrives late. Transports may run on the event
loops of different threads, as workers do. Everything is bounded: a sender waits while its peer does
not drain.
"""

import asyncio
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from barnraise.peering.transports.transport import ChannelClosedError
from barnraise.protocol.messages import MAX_FRAME_BYTES, Peer

SEND_WINDOW = 4 * MAX_FRAME_BYTES  # bytes in flight to a peer that has not received them
OPENED_SECONDS = 5.0  # after a dial, for which a router lets the dialled peer in
RESEND_DELAY = 0.2  # seconds by which a lost frame arrives late


@dataclass
class MemoryNetwork:
    """Decide which peers reach each other, and how fast.

    Attributes:
        bandwidth: Bytes per second of each channel.
        delay: Seconds that each frame takes.
        loss: Probability that a frame is lost and sent again.
        packet_overhead: Bytes of packets beyond the frames, for each byte of a frame.
        seed: Of the random losses.
        uplinks: Bytes per second of each channel of one peer, by its key, in place of `bandwidth`.
        natted: Keys of peers behind routers: such a peer is reached only by whom it has dialled
            within the last seconds.
        relayed: Keys of peers whose channels lead through a relay, to both ends.
    """

    bandwidth: float = float("inf")
    delay: float = 0.0
    loss: float = 0.0
    packet_overhead: float = 0.0
    seed: int = 0
    uplinks: dict[str, float] = field(default_factory=dict)
    natted: set[str] = field(default_factory=set)
    relayed: set[str] = field(default_factory=set)
    _dialled_at: dict[tuple[str, str], float] = field(default_factory=dict)
    _transports: dict[str, "MemoryTransport"] = field(default_factory=dict)
    _islands: list[frozenset[str]] = field(default_factory=list)
    _channels: set["MemoryChannel"] = field(default_factory=set)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def transport(self, key: str) -> "MemoryTransport":
        """Return a transport for the peer with this key."""
        return MemoryTransport(self, key)

    def partition(self, *islands: set[str]) -> None:
        """Separate the peers of different islands; a peer in none reaches all."""
        with self._lock:
            self._islands = [frozenset(island) for island in islands]
            separated = [c for c in self._channels if not self.can_reach(c.owner.key, c.peer)]
        for channel in separated:
            channel.close("the network is cut")

    def heal(self) -> None:
        """End the partition."""
        with self._lock:
            self._islands = []

    def can_reach(self, one: str, other: str) -> bool:
        """Return whether two peers, by key, are in one island or in none."""
        islands = [
            next((i for i, island in enumerate(self._islands) if key in island), None)
            for key in (one, other)
        ]
        return None in islands or islands[0] == islands[1]

    def attach(self, transport: "MemoryTransport") -> None:
        """Add a transport that has begun to listen.

        Raises:
            OSError: When its key is on this network already.
        """
        with self._lock:
            if transport.key in self._transports:
                raise OSError(f"{transport.key[:8]} is on this network already")
            self._transports[transport.key] = transport

    def detach(self, transport: "MemoryTransport") -> None:
        """Remove a transport and close its channels."""
        with self._lock:
            self._transports.pop(transport.key, None)
            channels = [c for c in self._channels if c.owner is transport]
        for channel in channels:
            channel.close("the machine left")

    def open_channel(
        self, dialler: "MemoryTransport", key: str, protocol: str = ""
    ) -> "MemoryChannel":
        """Return the dialler's end of a new channel to the peer with this key.

        Raises:
            ChannelClosedError: When there is no such peer, a partition separates them, or it does
                not speak the protocol.
        """
        with self._lock:
            listener = self._transports.get(key)
            now = time.monotonic()
            self._dialled_at[dialler.key, key] = now
            opened_at = self._dialled_at.get((key, dialler.key), -math.inf)
            is_closed = key in self.natted and now > opened_at + OPENED_SECONDS
            if listener is None or is_closed or not self.can_reach(dialler.key, key):
                raise ChannelClosedError(f"no answer from {key[:8]}")
            near_end = MemoryChannel(dialler, key)
            far_end = MemoryChannel(listener, dialler.key)
            near_end.connect_to(far_end)
            far_end.connect_to(near_end)
            self._channels |= {near_end, far_end}
        if not listener.offer(far_end, protocol):
            self.forget_channel(near_end, far_end)
            raise ChannelClosedError(f"{key[:8]} does not speak {protocol}")
        return near_end

    def probe(self, key: str, target: str) -> bool:
        """Return whether a stranger in the island of one peer, by key, reaches another."""
        with self._lock:
            listener = self._transports.get(target)
            if listener is None or target in self.natted or not self.can_reach(key, target):
                return False
            listener.probes_received += 1
        return True

    def forget_channel(self, *ends: "MemoryChannel") -> None:
        """Remove a channel that is being closed."""
        with self._lock:
            self._channels -= set(ends)


class MemoryTransport:
    """Open and accept channels on a `MemoryNetwork`; a test double of `transport.Transport`."""

    def __init__(self, network: MemoryNetwork, key: str) -> None:
        """Prepare a transport; `start` makes it listen."""
        self.network = network
        self.key = key
        self.loop: asyncio.AbstractEventLoop | None = None
        # protocol → channels that wait for `accept`
        self._incoming: dict[str, asyncio.Queue[MemoryChannel]] = {"": asyncio.Queue()}
        self.probes_received = 0

    @property
    def mappable_port(self) -> int:
        """No port: there is no router."""
        return 0

    async def start(self) -> None:
        """Listen on the running event loop."""
        self.loop = asyncio.get_running_loop()
        self.network.attach(self)

    def addresses(self) -> list[str]:
        """Return one made-up address; each transport is a host of its own."""
        return [_address_of(self.key)]

    async def set_relays(self, relays: Sequence[str]) -> None:
        """Ignore relays: this network has none."""

    def add_protocol(self, name: str) -> "MemoryProtocol":
        """Add a protocol; see `Transport.add_protocol`."""
        assert self.loop is None, "protocols are added before `start`"
        self._incoming[name] = asyncio.Queue()
        return MemoryProtocol(self, name)

    async def connect(self, peer: Peer) -> "MemoryChannel":
        """Dial a peer; see `Transport.connect`."""
        return await self.connect_for("", peer)

    async def probe(self, peer: Peer) -> bool:
        """Dial a peer as a stranger; see `Transport.probe`."""
        await asyncio.sleep(2 * self.network.delay)
        return self.network.probe(self.key, peer.key)

    async def connect_for(self, protocol: str, peer: Peer) -> "MemoryChannel":
        """Dial a peer for a protocol, by its name; see `Transport.connect`."""
        await asyncio.sleep(2 * self.network.delay)
        return self.network.open_channel(self, peer.key, protocol)

    def offer(self, channel: "MemoryChannel", protocol: str) -> bool:
        """Pass an incoming channel to `accept`. Safe to call from any thread.

        Returns:
            False when this peer does not speak the protocol.
        """
        if protocol not in self._incoming:
            return False
        _call_on_loop(self.loop, self._incoming[protocol].put_nowait, channel)
        return True

    async def accept(self) -> "MemoryChannel":
        """Return the next channel that another peer opened."""
        return await self.accept_for("")

    async def accept_for(self, protocol: str) -> "MemoryChannel":
        """Return the next channel that another peer opened for a protocol, by its name."""
        return await self._incoming[protocol].get()

    async def close(self) -> None:
        """Stop listening and close every channel."""
        self.network.detach(self)


class MemoryProtocol:
    """Open and accept the channels of one protocol of a `MemoryTransport`."""

    def __init__(self, transport: MemoryTransport, name: str) -> None:
        """Use `transport`, which its owner starts and closes."""
        self._transport = transport
        self._name = name
        self.key = transport.key

    async def connect(self, peer: Peer) -> "MemoryChannel":
        """Dial a peer; see `Transport.connect`."""
        return await self._transport.connect_for(self._name, peer)

    async def accept(self) -> "MemoryChannel":
        """Return the next channel that another peer opened for this protocol."""
        return await self._transport.accept_for(self._name)


class MemoryChannel:
    """Carry frames between two peers in memory; this is one end.

    Its state belongs to its owner's event loop: the other end only schedules calls there.
    """

    def __init__(self, owner: MemoryTransport, peer: str) -> None:
        """Create an end that belongs to `owner`; `connect_to` joins it with the other."""
        self.owner = owner
        self.peer = peer
        self.remote_address = "" if self.is_relayed else _address_of(peer)
        self.bytes_sent = 0
        self.bytes_received = 0
        self._other: MemoryChannel = self
        self._closed: str | None = None  # the reason
        self._in_transit: deque[bytes] = deque()  # frames that have not arrived
        self._arrived: deque[bytes] = deque()
        self._unreceived_bytes = 0  # sent, and not yet received by the other side
        self._changed = asyncio.Event()
        self._line_free_at = 0.0  # loop time at which the last frame has left
        self._last_due = 0.0  # loop time at which the last frame arrives

    def connect_to(self, other: "MemoryChannel") -> None:
        """Set the other end."""
        self._other = other

    def refresh_remote_address(self) -> bool:
        """Keep the address: nobody changes networks here."""
        return False

    @property
    def is_relayed(self) -> bool:
        """Whether one of the ends is reached through a relay."""
        return not self.owner.network.relayed.isdisjoint({self.owner.key, self.peer})

    async def send(self, frame: bytes) -> None:
        """Send a frame; see `Channel.send`."""
        assert len(frame) <= MAX_FRAME_BYTES
        network = self.owner.network
        loop = asyncio.get_running_loop()
        await self._wait_until(lambda: self._unreceived_bytes + len(frame) <= SEND_WINDOW)
        if self._closed:
            raise ChannelClosedError(self._closed or "")
        self._unreceived_bytes += len(frame)
        bandwidth = network.uplinks.get(self.owner.key, network.bandwidth)
        self._line_free_at = max(self._line_free_at, loop.time()) + len(frame) / bandwidth
        resend_delay = RESEND_DELAY if network.random.random() < network.loss else 0.0
        due = self._line_free_at + network.delay + resend_delay
        self._last_due = max(self._last_due, due)
        _call_on_loop(self._other.owner.loop, self._other._expect, self._last_due, frame)
        self.bytes_sent += int(len(frame) * (1 + network.packet_overhead))
        await asyncio.sleep(max(0.0, self._line_free_at - loop.time()))

    async def receive(self) -> bytes:
        """Return the next frame; see `Channel.receive`."""
        await self._wait_until(lambda: bool(self._arrived))
        if not self._arrived:
            raise ChannelClosedError(self._closed or "")
        frame = self._arrived.popleft()
        self.bytes_received += len(frame)
        _call_on_loop(self._other.owner.loop, self._other._on_received, len(frame))
        return frame

    async def _wait_until(self, ready: Callable[[], bool]) -> None:
        while not ready() and not self._closed:
            self._changed.clear()
            await self._changed.wait()

    def _expect(self, due: float, frame: bytes) -> None:
        """Deliver `frame` at loop time `due`, in order: timers of one moment fire in any order."""
        self._in_transit.append(frame)
        asyncio.get_running_loop().call_at(due, self._arrive)

    def _arrive(self) -> None:
        if self._in_transit:
            self._arrived.append(self._in_transit.popleft())
            self._changed.set()

    def _on_received(self, size: int) -> None:
        self._unreceived_bytes -= size
        self._changed.set()

    def close(self, reason: str) -> None:
        """Close this end now, and the other once the frames in transit have arrived.

        Safe to call from any thread.
        """
        other = self._other
        self.owner.network.forget_channel(self, other)
        _call_on_loop(self.owner.loop, self._shut, reason)
        _call_on_loop(
            other.owner.loop,
            lambda: asyncio.get_running_loop().call_at(
                self._last_due, other._shut, f"closed by peer: {reason}"
            ),
        )

    def _shut(self, reason: str) -> None:
        self._arrived.extend(self._in_transit)
        self._in_transit.clear()
        self._closed = self._closed or reason
        self._changed.set()


def _address_of(key: str) -> str:
    """Return a made-up public address; each key has a network of its own."""
    return f"[2a01:{int(key[:4], 16):x}:{int(key[4:8], 16):x}:{int(key[8:12], 16):x}::1]:1"


def _call_on_loop(
    loop: asyncio.AbstractEventLoop | None, call: Callable[..., Any], *values: object
) -> None:
    """Schedule a call on an event loop of any thread; do nothing when the loop has ended."""
    assert loop is not None
    try:
        loop.call_soon_threadsafe(call, *values)
    except RuntimeError:
        if not loop.is_closed():
            raise
