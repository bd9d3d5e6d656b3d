"""A network in memory: `transport.Transport` without sockets, with bandwidth, delay, loss and partitions.

Like QUIC it delivers whole frames in order: a lost frame is sent again and comes late. Transports may live on the event
loops of different threads, as workers do. Everything is bounded: a sender waits while its peer does not drain.
"""

import asyncio
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from barnraise.exchange.network.transport import ChannelClosedError
from barnraise.protocol.messages import MAX_FRAME, Peer

WINDOW = 4 * MAX_FRAME  # bytes under way to a peer that has not taken them
RESEND = 0.2  # seconds by which a lost frame is late


@dataclass
class MemoryNetwork:
    """Who can reach whom, and how fast. `bandwidth` in bytes/s a channel (`uplinks`: of what one machine sends, by its
    key), `delay` in seconds, `loss` of frames."""

    bandwidth: float = float("inf")
    delay: float = 0.0
    loss: float = 0.0
    seed: int = 0
    uplinks: dict[str, float] = field(default_factory=dict)
    _machines: dict[str, "MemoryTransport"] = field(default_factory=dict)
    _islands: list[frozenset[str]] = field(default_factory=list)
    _channels: set["MemoryChannel"] = field(default_factory=set)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self):
        self.chance = random.Random(self.seed)

    def transport(self, key: str) -> "MemoryTransport":
        return MemoryTransport(self, key)

    def partition(self, *islands: set[str]) -> None:
        """Machines of different islands lose each other; those in none reach everybody."""
        with self._lock:
            self._islands = [frozenset(island) for island in islands]
            cut = [c for c in self._channels if not self.reachable(c.owner.key, c.peer)]
        for channel in cut:
            channel.close("the network is cut")

    def heal(self) -> None:
        with self._lock:
            self._islands = []

    def reachable(self, one: str, other: str) -> bool:
        homes = [
            next((i for i, island in enumerate(self._islands) if key in island), None)
            for key in (one, other)
        ]
        return None in homes or homes[0] == homes[1]


class MemoryTransport:
    def __init__(self, network: MemoryNetwork, key: str):
        self.network, self.key = network, key
        self.loop: asyncio.AbstractEventLoop | None = None
        self._opened: asyncio.Queue[MemoryChannel] = asyncio.Queue()

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        with self.network._lock:
            if self.key in self.network._machines:
                raise OSError(f"{self.key[:8]} is on this network already")
            self.network._machines[self.key] = self

    def addresses(self) -> list[str]:
        return [f"memory:{self.key[:16]}"]

    async def connect(self, peer: Peer) -> "MemoryChannel":
        await asyncio.sleep(2 * self.network.delay)
        with self.network._lock:
            other = self.network._machines.get(peer.key)
            if other is None or not self.network.reachable(self.key, peer.key):
                raise ChannelClosedError(f"no answer from {peer.key[:8]}")
            here, there = MemoryChannel(self, peer.key), MemoryChannel(other, self.key)
            here.other, there.other = there, here
            self.network._channels |= {here, there}
        _tell(other.loop, other._opened.put_nowait, there)
        return here

    async def accept(self) -> "MemoryChannel":
        return await self._opened.get()

    async def close(self) -> None:
        with self.network._lock:
            self.network._machines.pop(self.key, None)
            mine = [c for c in self.network._channels if c.owner is self]
        for channel in mine:
            channel.close("the machine left")


class MemoryChannel:
    """One end. Its state belongs to its owner's loop; the other end only sends calls there."""

    def __init__(self, owner: MemoryTransport, peer: str):
        self.owner, self.peer = owner, peer
        self.other: MemoryChannel = self  # set by connect
        self.bytes_sent = self.bytes_received = 0
        self.closed: str | None = None
        self._coming: deque[bytes] = deque()  # on the line
        self._frames: deque[bytes] = deque()
        self._under_way = 0  # bytes sent and not yet taken by the other side
        self._changed = asyncio.Event()
        self._free_at = self._due = (
            0.0  # loop times: when the line is free, when the last frame arrives
        )

    async def send(self, frame: bytes) -> None:
        assert len(frame) <= MAX_FRAME
        network, loop = self.owner.network, asyncio.get_running_loop()
        await self._until(lambda: self._under_way + len(frame) <= WINDOW)
        if self.closed:
            raise ChannelClosedError(self.closed)
        self._under_way += len(frame)
        speed = network.uplinks.get(self.owner.key, network.bandwidth)
        self._free_at = max(self._free_at, loop.time()) + len(frame) / speed
        late = RESEND if network.chance.random() < network.loss else 0.0
        self._due = max(self._due, self._free_at + network.delay + late)
        _tell(self.other.owner.loop, self.other._expect, self._due, frame)
        self.bytes_sent += len(frame)
        await asyncio.sleep(max(0.0, self._free_at - loop.time()))

    async def receive(self) -> bytes:
        await self._until(lambda: bool(self._frames))
        if not self._frames:
            raise ChannelClosedError(self.closed)
        frame = self._frames.popleft()
        self.bytes_received += len(frame)
        _tell(self.other.owner.loop, self.other._taken, len(frame))
        return frame

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready() and not self.closed:
            self._changed.clear()
            await self._changed.wait()

    def _expect(self, due: float, frame: bytes) -> None:
        """Timers of one moment fire in any order: the frames keep theirs here."""
        self._coming.append(frame)
        asyncio.get_running_loop().call_at(due, self._arrive)

    def _arrive(self) -> None:
        if self._coming:
            self._frames.append(self._coming.popleft())
            self._changed.set()

    def _taken(self, size: int) -> None:
        self._under_way -= size
        self._changed.set()

    def close(self, reason: str) -> None:
        """Both ends close: this one now, the other once what is under way has come. Safe from any thread."""
        with self.owner.network._lock:
            self.owner.network._channels -= {self, self.other}
        _tell(self.owner.loop, self._shut, reason)
        other = self.other
        _tell(
            other.owner.loop,
            lambda: other.owner.loop.call_at(self._due, other._shut, f"closed by peer: {reason}"),
        )

    def _shut(self, reason: str) -> None:
        self._frames.extend(self._coming)
        self._coming.clear()
        self.closed = self.closed or reason
        self._changed.set()


def _tell(loop: asyncio.AbstractEventLoop | None, call: Callable, *values) -> None:
    """Runs a call on a loop of any thread; a loop that has ended has nobody left to care."""
    assert loop is not None
    try:
        loop.call_soon_threadsafe(call, *values)
    except RuntimeError:
        if not loop.is_closed():
            raise
