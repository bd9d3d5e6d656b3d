"""Connect every machine of a mixing run to every other one, on an event loop of its own thread.

It uses the transports of the exchange of updates (`exchange/network/transport.py`): iroh, where
a channel's other end has proven its key. Only admitted keys are connected. All channels of the mesh
share this machine's uplink.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from barnraise.errors import MessageError
from barnraise.exchange.mixing.step_inbox import (
    MAX_STORED,
    PIECE_BYTES,
    ROSTER_BYTES,
    FrameKind,
    MixingFrame,
    StepInbox,
)
from barnraise.exchange.network.transport import Channel, ChannelClosedError, Transport
from barnraise.protocol.messages import Peer

log = logging.getLogger("barnraise.exchange")

REDIAL_SECONDS = 2.0
MAX_STATE_BYTES = 1 << 34  # of weights in 32 bits that a joining machine fetches


@dataclass
class _Link:
    """One channel, and what waits to be sent over it."""

    channel: Channel
    queue: deque[tuple[MixingFrame, bytes]] = field(default_factory=deque)  # frame, payload
    has_work: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _StateFetch:
    """Weights in 32 bits that one neighbour is sending."""

    key: str
    step: int = 0
    data: bytearray = field(default_factory=bytearray)
    complete: bool = False


class MeshLinks:
    """Send beacons and weights to neighbours, and collect theirs in an inbox.

    All public methods are for the training loop's thread.

    Attributes:
        key: this machine's own.
        bytes_sent: payload bytes handed to the channels since the start.
    """

    def __init__(
        self, transport: Transport, members: list[Peer], payload_bytes: int, state_bytes: int
    ) -> None:
        """Prepare the links; `start` opens them.

        Args:
            transport: carries the frames.
            members: the machines that may take part, with their addresses. The one with the greater
                key dials.
            payload_bytes: of everyone's weights as sent in a step.
            state_bytes: of the weights in 32 bits.
        """
        assert state_bytes <= MAX_STATE_BYTES
        self.key = transport.key
        self.bytes_sent = 0
        self._transport = transport
        self._members = {peer.key: peer for peer in members if peer.key != transport.key}
        self._state_bytes = state_bytes
        self._inbox = StepInbox(payload_bytes)
        self._links: dict[str, _Link] = {}
        self._changed = threading.Condition()
        self._state: tuple[int, bytes] = (0, b"")  # step and weights that joining machines get
        self._fetch: _StateFetch | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="barnraise-mixing", daemon=True)

    # ---- the training loop's side ---------------------------------------------------------------

    def start(self) -> None:
        """Listen and begin to dial.

        Raises:
            OSError: When the transport cannot listen.
        """
        self._thread.start()
        self._call(self._open()).result()

    def stop(self) -> None:
        """Close all channels and end the thread."""
        self._call(self._close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def neighbours(self) -> list[str]:
        """Return the sorted keys of all machines with an open channel."""
        with self._changed:
            return self._inbox.neighbours

    def wait_for(self, is_done: Callable[[StepInbox], bool], seconds: float) -> bool:
        """Wait until something holds of the inbox.

        Args:
            is_done: called under the lock after each change; may remove weights from the inbox.
            seconds: for which to wait at most.

        Returns:
            Whether it holds; False when the time is over.
        """
        with self._changed:
            return self._changed.wait_for(lambda: is_done(self._inbox), seconds)

    def send_step(self, step: int, roster: bytes, payload: bytes, receivers: list[str]) -> None:
        """Send everybody a beacon, and some the weights.

        Args:
            step: of this machine.
            roster: digest of this machine's roster.
            payload: this machine's weights, encoded.
            receivers: keys of the neighbours that the weights are for.
        """
        with self._changed:
            self._inbox.start_step(step)
        self._loop.call_soon_threadsafe(self._queue_step, step, roster, payload, set(receivers))

    def offer_state(self, step: int, weights: bytes) -> None:
        """Set the weights, in 32 bits, that machines which join will get."""
        self._state = (step, weights)

    def fetch_state(self, key: str, seconds: float) -> tuple[int, bytes] | None:
        """Fetch a neighbour's weights in 32 bits.

        Args:
            key: the neighbour's.
            seconds: for which to wait at most.

        Returns:
            The neighbour's step and its weights; None if it did not send them.
        """
        fetch = _StateFetch(key)
        with self._changed:
            self._fetch = fetch
        request = MixingFrame(FrameKind.STATE_REQUEST, 0, bytes(ROSTER_BYTES))
        self._loop.call_soon_threadsafe(self._queue, key, request, b"")
        with self._changed:
            is_whole = self._changed.wait_for(
                lambda: fetch.complete or key not in self._inbox.neighbours, seconds
            )
            self._fetch = None
        return (fetch.step, bytes(fetch.data)) if is_whole and fetch.complete else None

    # ---- the event loop's side ------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _open(self) -> None:
        await self._transport.start()
        self._tasks = [asyncio.create_task(self._accept())]
        for key, peer in self._members.items():
            if self.key > key:
                self._tasks.append(asyncio.create_task(self._dial(peer)))

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in list(self._links.values()):
            link.channel.close("this machine leaves the run")
        await self._transport.close()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            channel = await self._transport.accept()
            if channel.peer in self._members:
                self._tasks.append(asyncio.create_task(self._serve(channel)))
            else:
                log.warning("refused %s: it is not a member of this run", channel.peer[:8])
                channel.close("you are not a member of this run")
            self._tasks = [task for task in self._tasks if not task.done()]

    async def _dial(self, peer: Peer) -> None:
        """Connect to a member, and again whenever the channel has ended."""
        while True:
            with contextlib.suppress(ChannelClosedError):
                channel = await self._transport.connect(peer)
                await channel.send(MixingFrame(FrameKind.HELLO, 0, bytes(ROSTER_BYTES)).pack())
                await self._serve(channel)
            await asyncio.sleep(REDIAL_SECONDS)

    async def _serve(self, channel: Channel) -> None:
        """Send and receive over one channel until it ends."""
        key = channel.peer
        older = self._links.get(key)
        if older is not None:
            older.channel.close("replaced by a newer channel")
        link = self._links[key] = _Link(channel)
        with self._changed:
            self._inbox.add_neighbour(key)
            self._changed.notify_all()
        writer = asyncio.create_task(self._write(link))
        try:
            while True:
                self._accept_frame(key, MixingFrame.unpack(await channel.receive()))
        except MessageError as error:
            log.warning("dropped %s: %s", key[:8], error)
            channel.close(str(error))
        except ChannelClosedError as error:
            log.info("the channel to %s has ended: %s", key[:8], error)
        finally:
            writer.cancel()
            if self._links.get(key) is link:
                del self._links[key]
                with self._changed:
                    self._inbox.remove_neighbour(key)
                    self._changed.notify_all()

    def _accept_frame(self, key: str, frame: MixingFrame) -> None:
        if frame.kind is FrameKind.STATE_REQUEST:
            step, weights = self._state
            if weights:
                self._queue(key, MixingFrame(FrameKind.STATE, step, frame.roster), weights)
            return
        with self._changed:
            if frame.kind is FrameKind.STATE:
                self._accept_state(key, frame)
            else:
                self._inbox.accept(key, frame)
            self._changed.notify_all()

    def _accept_state(self, key: str, frame: MixingFrame) -> None:
        fetch = self._fetch
        if fetch is None or fetch.key != key:
            return
        if frame.total != self._state_bytes or frame.offset != len(fetch.data):
            raise MessageError("a piece of a state has the wrong size or place")
        fetch.step = frame.step
        fetch.data += frame.data
        fetch.complete = len(fetch.data) == frame.total

    def _queue_step(self, step: int, roster: bytes, payload: bytes, receivers: set[str]) -> None:
        for key in list(self._links):
            self._queue(key, MixingFrame(FrameKind.BEACON, step, roster), b"")
            if key in receivers:
                self._queue(key, MixingFrame(FrameKind.WEIGHTS, step, roster), payload)

    def _queue(self, key: str, frame: MixingFrame, payload: bytes) -> None:
        """Queue a frame, whose payload is sent in pieces.

        Of a neighbour's weights that it has not read, the newest wait: it has gone on without the
        others.
        """
        link = self._links.get(key)
        if link is None:
            return
        waiting = [each for each in link.queue if each[0].kind is FrameKind.WEIGHTS]
        if frame.kind is FrameKind.WEIGHTS and len(waiting) >= MAX_STORED:
            link.queue.remove(waiting[0])
        link.queue.append((frame, payload))
        link.has_work.set()

    async def _write(self, link: _Link) -> None:
        with contextlib.suppress(ChannelClosedError):
            while True:
                while link.queue:
                    await self._write_payload(link, *link.queue.popleft())
                link.has_work.clear()
                await link.has_work.wait()

    async def _write_payload(self, link: _Link, frame: MixingFrame, payload: bytes) -> None:
        total = len(payload)
        for offset in range(0, max(1, total), PIECE_BYTES):
            piece = payload[offset : offset + PIECE_BYTES]
            part = MixingFrame(frame.kind, frame.step, frame.roster, total, offset, piece)
            await link.channel.send(part.pack())
            self.bytes_sent += len(piece)
