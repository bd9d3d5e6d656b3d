"""Connect every machine of a mixing run to every other one, on an event loop.

It uses a protocol of its own over the transport of the exchange of updates
(`peering/transports/transport.py`), where a channel's other end has proven its key. Who is a
member, and how one proves it, is decided by `mesh_members.py`. All channels of the mesh share this
machine's uplink.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from barnraise.errors import MessageError
from barnraise.mixing.mesh_members import TicketedMembership
from barnraise.mixing.payloads import Payload
from barnraise.mixing.step_inbox import (
    MAX_STORED,
    PIECE_BYTES,
    ROSTER_BYTES,
    FrameKind,
    GroupArrivals,
    MixingFrame,
    StepInbox,
)
from barnraise.peering.limits.back_off import BackOff
from barnraise.peering.limits.rate_limit import FairShare, Meter, TokenBucket, UplinkSender
from barnraise.peering.limits.repeated_warnings import RepeatedWarnings
from barnraise.peering.limits.service_limits import SERVICE_LIMITS, Service
from barnraise.peering.server_thread import ServerThread
from barnraise.peering.transports.transport import Channel, ChannelClosedError
from barnraise.planning.mixing_topology import MAX_MACHINES
from barnraise.protocol.messages import Peer

log = logging.getLogger("barnraise.exchange")

# Between two dials of a member that does not answer; members to dial are chosen as often as first.
MEMBER_REDIAL = BackOff(2.0, 60.0)
# The machine with the greater key dials; the other one does so too once it has waited for so long,
# because the first may not know it or not reach it.
LATE_DIAL_SECONDS = 10.0
CLOSE_SECONDS = 10.0  # for which `stop` waits for the event loop
MAX_STATE_BYTES = 1 << 34  # of weights in 32 bits that a joining machine fetches
# A joining machine waits longer for weights that arrive, as long as they do so at least this fast.
MIN_STATE_BYTES_PER_SECOND = 32_000.0
# Frames of a kind that wait for one neighbour.
MAX_QUEUED = {
    FrameKind.BEACON: 1,
    FrameKind.WEIGHTS: MAX_STORED,
    FrameKind.STATE_REQUEST: 1,
    FrameKind.STATE: 1,
}
MESH_POLL_SECONDS = 0.2  # between two questions whether to stop waiting
STATE_REQUEST = MixingFrame(FrameKind.STATE_REQUEST, 0, bytes(ROSTER_BYTES))


@dataclass
class _Link:
    """One channel, and what waits to be sent over it."""

    channel: Channel
    queue: deque[tuple[MixingFrame, Payload]] = field(default_factory=deque)  # frame, payload
    has_work: asyncio.Event = field(default_factory=asyncio.Event)
    is_sending_state: bool = False  # weights in 32 bits are in the queue or on their way
    # This machine's weights for a neighbour that has not reached their step; see `send_step`.
    early_weights: tuple[MixingFrame, Payload] | None = None
    small_frames: TokenBucket = field(
        default_factory=lambda: TokenBucket(SERVICE_LIMITS[Service.SMALL_MIXING_FRAMES]["peer"])
    )


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
        bytes_sent: of payloads, handed to the channels since the start.
        bytes_received: of payloads, received since the start.
    """

    def __init__(
        self,
        membership: TicketedMembership,
        payload_bytes: int,
        state_bytes: int,
        thread: ServerThread,
        uplink: FairShare,
    ) -> None:
        """Prepare the links; `start` opens them.

        Weights have so many bytes as sent in a step, and in 32 bits. All that is sent shares the
        uplink.
        """
        assert state_bytes <= MAX_STATE_BYTES
        self.key = membership.key
        self.bytes_sent = 0
        self.bytes_received = 0
        self._membership = membership
        self._state_bytes = state_bytes
        self._inbox = StepInbox(payload_bytes)
        self._links: dict[str, _Link] = {}
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._known_since: dict[str, float] = {}  # by key, loop time
        self._failures: dict[str, int] = {}  # by key, dials in a row without a link
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = threading.Condition()
        self._has_logged_refusal = False  # for want of room
        self._repeats = RepeatedWarnings()
        self._state: tuple[int, Payload] = (0, b"")  # step and weights that joining machines get
        self._beacon: MixingFrame | None = None  # of the current step; a new link begins with it
        self._fetch: _StateFetch | None = None
        self._uplink = uplink
        self._meters = Meter(), Meter()  # of bytes sent and received
        self._thread = thread

    # ---- the training loop's side ---------------------------------------------------------------

    def start(self) -> None:
        """Begin to accept and to dial."""
        self._thread.run(self._open(), None)

    def stop(self) -> None:
        """Close all channels."""
        ends_at = time.monotonic() + CLOSE_SECONDS
        self._thread.run(self._close(), None, lambda: time.monotonic() > ends_at)

    @property
    def sent_rate(self) -> float:
        """Return the bytes per second that are sent now."""
        return self._meters[0].rate

    @property
    def received_rate(self) -> float:
        """Return the bytes per second that are received now."""
        return self._meters[1].rate

    def neighbours(self) -> list[str]:
        """Return the sorted keys of all machines with an open channel."""
        with self._changed:
            return self._inbox.neighbours

    def leader(self) -> str | None:
        """Return the key of the neighbour that has begun the highest step; None if none has."""
        with self._changed:
            return self._inbox.leader()

    def newest_step(self) -> int:
        """Return the highest step that a neighbour has begun; -1 if none has."""
        with self._changed:
            return self._inbox.newest_step()

    def wait_for(
        self,
        is_done: Callable[[StepInbox], bool],
        seconds: float,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait until something holds of the inbox, which is asked under the lock after each change.

        Returns:
            Whether it holds; False when the time is over or the wait was stopped.
        """
        return self._wait(lambda: is_done(self._inbox), lambda: seconds, should_stop)

    def pop_arrivals(self, keys: Sequence[str], step: int, roster: bytes) -> GroupArrivals:
        """Remove and return what neighbours have sent; see `StepInbox.pop_arrivals`."""
        with self._changed:
            return self._inbox.pop_arrivals(keys, step, roster)

    def send_step(
        self,
        step: int,
        roster: bytes,
        payload: Payload,
        group_at: Callable[[int], Collection[str]],
    ) -> None:
        """Send everybody a beacon, and this step's group the weights.

        Where the uplink is limited, a neighbour gets the weights once its own beacon says that it
        has reached the step. It cannot mix them before, and its line still carries the weights of
        the step before: with two machines that send to it at one time, a router drops packets of
        both. A line without a limit has room for both, and sends at once.

        Args:
            step: of this machine.
            roster: digest of this machine's roster.
            payload: this machine's weights, encoded; nothing may change them afterwards.
            group_at: returns the keys of the neighbours that this machine mixes with in a step.
        """
        with self._changed:
            self._inbox.start_step(step, group_at)
        self._thread.call(self._queue_step, step, roster, payload, frozenset(group_at(step)))

    def offer_state(self, step: int, weights: Payload) -> None:
        """Set the weights, in 32 bits, that machines which join will get."""
        self._state = (step, weights)

    def fetch_state(
        self, key: str, seconds: float, should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[int, bytearray] | None:
        """Fetch a neighbour's weights in 32 bits.

        Args:
            key: the neighbour's.
            seconds: for which to wait at most while nothing arrives. Every byte that does prolongs
                the wait, so that a slow line does not restart the transfer.
            should_stop: called several times a second, without the lock; ends the wait.

        Returns:
            The neighbour's step and its weights; None if it did not send them.
        """
        fetch = _StateFetch(key)
        with self._changed:
            self._fetch = fetch
        self._thread.call(self._queue, key, STATE_REQUEST, b"")
        self._wait(
            lambda: fetch.complete or key not in self._inbox.neighbours,
            lambda: seconds + len(fetch.data) / MIN_STATE_BYTES_PER_SECOND,
            should_stop,
        )
        with self._changed:
            self._fetch = None
        return (fetch.step, fetch.data) if fetch.complete else None

    def _wait(
        self,
        is_done: Callable[[], bool],
        limit: Callable[[], float],
        should_stop: Callable[[], bool],
    ) -> bool:
        """Wait until `is_done`, under the lock, for `limit` seconds; return whether it is."""
        started = time.monotonic()
        while True:
            left = started + limit() - time.monotonic()
            with self._changed:
                if self._changed.wait_for(is_done, max(0.0, min(left, MESH_POLL_SECONDS))):
                    return True
            if left <= 0 or should_stop():
                return False

    # ---- the event loop's side ------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _open(self) -> None:
        self._spawn(self._accept())
        self._spawn(self._maintain())

    async def _close(self) -> None:
        for link in list(self._links.values()):
            link.channel.close("this machine leaves the run")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            self._spawn(self._meet(await self._membership.accept(), dialled=False))

    async def _maintain(self) -> None:
        """Dial members without a link, and end the links of those that are members no longer."""
        while True:
            now = asyncio.get_running_loop().time()
            self._meters[0].update(self.bytes_sent, now)
            self._meters[1].update(self.bytes_received, now)
            for key, link in list(self._links.items()):
                if problem := self._membership.find_problem(key):
                    log.warning("ended the link to %s: %s", key[:8], problem)
                    link.channel.close(problem)
            members = self._membership.list_members()
            self._forget_strangers({peer.key for peer in members} | self._links.keys())
            for peer in members:
                waited = now - self._known_since.setdefault(peer.key, now)
                is_ours = self.key > peer.key or waited > LATE_DIAL_SECONDS
                is_wanted = peer.key not in self._links and self._has_room_for(peer.key)
                if is_ours and is_wanted and peer.key not in self._dials:
                    self._dials[peer.key] = self._spawn(self._dial(peer))
            await asyncio.sleep(MEMBER_REDIAL.first_seconds)

    def _forget_strangers(self, members: Collection[str]) -> None:
        """Forget machines that are known no longer: peers may name any number of keys."""
        self._known_since = {k: at for k, at in self._known_since.items() if k in members}
        self._failures = {k: count for k, count in self._failures.items() if k in members}

    async def _dial(self, peer: Peer) -> None:
        """Dial a member, serve the channel until it ends, and wait before the next dial."""
        try:
            with contextlib.suppress(ChannelClosedError):
                await self._meet(await self._membership.connect(peer), dialled=True)
            failures = self._failures[peer.key] = self._failures.get(peer.key, -1) + 1
            await asyncio.sleep(MEMBER_REDIAL.pause_seconds(failures) - MEMBER_REDIAL.first_seconds)
        finally:
            self._dials.pop(peer.key, None)

    async def _meet(self, channel: Channel, dialled: bool) -> None:
        """Serve a channel whose other end is a member."""
        if not self._has_room_for(channel.peer):  # before the handshake, which costs signatures
            self._refuse_for_room(channel)
            return
        try:
            await self._membership.admit(channel, dialled)
        except (MessageError, ChannelClosedError, TimeoutError) as error:
            reason = str(error) or "it did not introduce itself in time"
            self._repeats.warn(reason, "refused to mix with %s: %s", channel.peer[:8], reason)
            channel.close(reason)
            return
        if not self._has_room_for(channel.peer):  # others were admitted meanwhile
            self._refuse_for_room(channel)
            return
        await self._serve(channel)

    def _has_room_for(self, key: str) -> bool:
        """Return whether this machine may be linked to another one: it is, or there is room."""
        return key in self._links or len(self._links) < MAX_MACHINES - 1

    def _refuse_for_room(self, channel: Channel) -> None:
        """Close a channel for which there is no room. One line in the log stands for all."""
        reason = f"at most {MAX_MACHINES} machines average weights with each other"
        if not self._has_logged_refusal:
            self._has_logged_refusal = True
            log.warning(
                "refused to mix with %s: %s, and all places are occupied. A machine without a "
                "place trains alone until one is free; later refusals are not logged",
                channel.peer[:8],
                reason,
            )
        channel.close(reason)

    async def _serve(self, channel: Channel) -> None:
        """Send and receive over one channel until it ends."""
        key = channel.peer
        clock = asyncio.get_running_loop().time
        older = self._links.get(key)
        if older is not None:
            older.channel.close("replaced by a newer channel")
        link = self._links[key] = _Link(channel)
        self._failures.pop(key, None)
        with self._changed:
            self._inbox.add_neighbour(key)
            self._changed.notify_all()
        if self._beacon is not None:  # a machine that joins learns where the others are
            self._queue(key, self._beacon, b"")
        if self._fetch is not None and self._fetch.key == key:
            self._queue(key, STATE_REQUEST, b"")  # the older channel may have lost the first one
        writer = asyncio.create_task(self._write(link))
        try:
            while True:
                frame = MixingFrame.unpack(await channel.receive())
                if len(frame.data) < PIECE_BYTES:
                    delay = link.small_frames.consume(1, clock())
                    await asyncio.sleep(delay)  # also without a delay: others have their turn
                self._accept_frame(key, frame)
        except MessageError as error:
            log.warning("dropped %s: %s", key[:8], error)
            channel.close(str(error))
        except ChannelClosedError as error:
            log.info("the channel to %s has ended: %s", key[:8], error)
        finally:
            writer.cancel()
            if self._links.get(key) is link:
                del self._links[key]
                self._known_since[key] = clock()
                with self._changed:
                    self._inbox.remove_neighbour(key)
                    self._changed.notify_all()

    def _accept_frame(self, key: str, frame: MixingFrame) -> None:
        self.bytes_received += len(frame.data)
        if frame.kind is FrameKind.STATE_REQUEST:
            self._queue_state(key, frame)
            return
        with self._changed:
            if frame.kind is FrameKind.STATE:
                is_awaited = self._accept_state(key, frame)
            else:
                is_awaited = self._inbox.accept(key, frame)
            if is_awaited:  # each notice wakes the training loop's thread
                self._changed.notify_all()
        if frame.kind is FrameKind.BEACON:
            self._queue_early_weights(key)

    def _queue_state(self, key: str, request: MixingFrame) -> None:
        """Queue the weights for a machine that joins, unless it has some to receive already.

        A request is a few bytes, and its answer all weights: only one may wait for each link.
        """
        step, weights = self._state
        link = self._links.get(key)
        if weights and link is not None and not link.is_sending_state:
            link.is_sending_state = True
            self._queue(key, MixingFrame(FrameKind.STATE, step, request.roster), weights)

    def _accept_state(self, key: str, frame: MixingFrame) -> bool:
        """Store a piece of the weights that are being fetched; return whether it was the last one.

        Pieces of an earlier answer, on which this machine has given up, may still arrive: they are
        ignored until an answer begins.
        """
        fetch = self._fetch
        if fetch is None or fetch.complete or fetch.key != key:
            return False
        if frame.offset == 0:
            fetch.data.clear()
        elif not fetch.data:
            return False
        if frame.total != self._state_bytes or frame.offset != len(fetch.data):
            raise MessageError("a piece of a state has the wrong size or place")
        fetch.step = frame.step
        fetch.data += frame.data
        fetch.complete = len(fetch.data) == frame.total
        return fetch.complete

    def _queue_step(self, step: int, roster: bytes, payload: Payload, receivers: set[str]) -> None:
        self._beacon = MixingFrame(FrameKind.BEACON, step, roster)
        weights = MixingFrame(FrameKind.WEIGHTS, step, roster)
        for key, link in list(self._links.items()):
            self._queue(key, self._beacon, b"")
            link.early_weights = (weights, payload) if key in receivers else None
            self._queue_early_weights(key)

    def _queue_early_weights(self, key: str) -> None:
        """Queue the weights that wait for a neighbour, if it has reached their step.

        A neighbour that is beyond it mixes without them. See `send_step`.
        """
        link = self._links.get(key)
        if link is None or link.early_weights is None:
            return
        frame, payload = link.early_weights
        with self._changed:
            reached = self._inbox.find_step(key)
        if reached < frame.step and self._uplink.is_limited:
            return
        link.early_weights = None
        if reached <= frame.step:
            self._queue(key, frame, payload)

    def _queue(self, key: str, frame: MixingFrame, payload: Payload) -> None:
        """Queue a frame, whose payload is sent in pieces.

        Of what a neighbour has not read the newest waits: it has gone on without the other weights,
        and only the last beacon and the last request count. So a neighbour that reads nothing costs
        a few frames, whatever the number of steps.
        """
        link = self._links.get(key)
        if link is None:
            return
        waiting = [each for each in link.queue if each[0].kind is frame.kind]
        if len(waiting) >= MAX_QUEUED[frame.kind]:
            link.queue.remove(waiting[0])
        link.queue.append((frame, payload))
        link.has_work.set()

    async def _write(self, link: _Link) -> None:
        """Send what is queued. An error of this program ends the link instead of silencing it."""
        sender = UplinkSender(self._uplink)
        try:
            while True:
                while link.queue:
                    frame, payload = link.queue.popleft()
                    await self._write_payload(link, sender, frame, payload)
                    sender.end_transfer()
                    if frame.kind is FrameKind.STATE:
                        link.is_sending_state = False
                link.has_work.clear()
                await link.has_work.wait()
        except ChannelClosedError as error:
            log.debug("nothing more is sent to %s: %s", link.channel.peer[:8], error)
        except Exception as error:
            log.critical("sending to %s failed", link.channel.peer[:8], exc_info=True)
            link.channel.close(f"sending failed: {error}")
        finally:
            sender.end_transfer()

    async def _write_payload(
        self, link: _Link, sender: UplinkSender, frame: MixingFrame, payload: Payload
    ) -> None:
        total = len(payload)
        view = memoryview(payload)
        for offset in range(0, max(1, total), PIECE_BYTES):
            piece = view[offset : offset + PIECE_BYTES]
            part = MixingFrame(frame.kind, frame.step, frame.roster, total, offset, piece)
            await sender.wait_for_turn(len(piece))
            await link.channel.send(part.pack())
            self.bytes_sent += len(piece)
