"""Keep what waits to be sent to one connected peer, and who that peer has proven to be.

Each connection has writers of its own, so that a slow peer holds up nobody else. One sends
messages, which never wait behind more than one piece of payload. Another sends payloads and,
where the uplink is capped, has turns with all other connections. Everything that waits is
bounded: small messages in a short queue, a `PeerState` that is composed only when it can go out,
and updates and blobs by name, whose bytes are read from their files piece by piece as the channel
drains. This machine's own fresh updates have a writer of their own, which goes first.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from barnraise.errors import FloodError
from barnraise.peering.limits.rate_limit import FairShare, Meter, TokenBucket, UplinkSender
from barnraise.peering.limits.service_limits import SERVICE_LIMITS, Service
from barnraise.peering.membership.membership import Meeting
from barnraise.peering.transports.framing import header_size, pack
from barnraise.peering.transports.transport import Channel
from barnraise.protocol.enums import Standing
from barnraise.protocol.messages import Hello, PeerState, Ticket
from barnraise.protocol.types import Message
from barnraise.protocol.versions import SPOKEN_PROTOCOLS, find_common_version, is_understood

log = logging.getLogger("barnraise.exchange")

MAX_QUEUED_MESSAGES = 8192  # small messages that may wait for one peer
MAX_QUEUED_TRANSFERS = 4096  # updates, and blobs, that may wait for one peer
MAX_QUEUED_LINE_TESTS = 4  # steps of a line's test that may wait for one peer

# Messages of one transfer, each with the payload behind it; read as the channel drains.
OutgoingMessages = Iterator[tuple[Message, bytes]]


@dataclass(frozen=True)
class MessageSources:
    """Provide what the connections' writers send.

    Attributes:
        compose_state: Returns our PeerState for a peer by key; None if there is none to send.
        open_update: Returns the messages of (peer's key, author, seq, whole, is_requested), with
            payloads if `whole`.
        open_blob: Returns the messages of (peer's key, digest, offset).
        open_line_test: Returns the messages of a number of bytes without meaning.
        uplink: The share of the uplink that payloads wait for.
    """

    compose_state: Callable[[str], PeerState | None]
    open_update: Callable[[str, str, int, bool, bool], OutgoingMessages]
    open_blob: Callable[[str, str, int], OutgoingMessages]
    open_line_test: Callable[[int], OutgoingMessages]
    uplink: FairShare


def _bucket(service: Service) -> TokenBucket:
    return TokenBucket(SERVICE_LIMITS[service]["peer"])


class Connection:
    """Hold one peer's channel, its send queues and its rates."""

    def __init__(
        self,
        channel: Channel,
        hello: Hello,
        ticket: Ticket,
        dialled: bool,
        connected_at: float,
        stated_addresses: Collection[str] = (),
    ) -> None:
        """Wrap a channel after the handshake, whose time is the event loop's in seconds.

        The Hello and its ticket are checked already. `stated_addresses` is where this machine is
        reached, as it stated to the peer.
        """
        self.channel = channel
        self.hello = hello
        self.ticket = ticket
        self.dialled = dialled
        self.connected_at = connected_at
        self.stated_addresses = frozenset(stated_addresses)
        self.key = channel.peer
        self.sent_meter = Meter()
        self.received_meter = Meter()
        self._frame_limit = _bucket(Service.FRAMES)
        self._byte_limit = _bucket(Service.FRAME_BYTES)
        self._header_limit = _bucket(Service.HEADER_BYTES)
        self._update_limit = _bucket(Service.UPDATE_HEADERS)
        self._requested_limit = _bucket(Service.REQUESTED_UPDATES)
        self._unwanted_limit = _bucket(Service.UNWANTED_BYTES)
        self._messages: deque[Message] = deque()
        self._state_due = False
        # Ordered sets: a peer that requests much must not make each further request slower.
        # What `open_transfer` of the sources gets → the transfer's rank at the uplink.
        self._own_updates: dict[tuple[str, int, bool, bool], float] = {}
        self._updates: dict[tuple[str, int, bool, bool], float] = {}
        self._blobs: dict[tuple[str, int], float] = {}
        self._line_tests: dict[tuple[int], float] = {}
        self._message_waits = asyncio.Event()
        self._payload_waits = asyncio.Event()
        self._own_update_waits = asyncio.Event()
        self._write_lock = asyncio.Lock()  # one frame at a time
        self._counted_bytes = 0  # sent, of those that the uplink's limit counts
        self.update_meters(connected_at)

    @property
    def meeting(self) -> Meeting:
        """How the connection came about, as the handshake proved it."""
        address, claimed = self.channel.remote_address, tuple(self.hello.addresses)
        newcomer = self.ticket.standing is Standing.NEWCOMER
        return Meeting(self.ticket.volunteer, self.dialled, address, claimed, newcomer)

    def renew_introduction(self, hello: Hello, ticket: Ticket) -> None:
        """Replace the peer's Hello and ticket by newer ones, already checked."""
        self.hello = hello
        self.ticket = ticket

    def send_introduction(self, hello: Hello) -> None:
        """Introduce this machine again, whose ticket or addresses have changed."""
        self.stated_addresses = frozenset(hello.addresses)
        self.send_message(hello)

    @property
    def protocol(self) -> int:
        """The newest version of the protocol that both sides speak."""
        return find_common_version(self.hello.protocols) or min(SPOKEN_PROTOCOLS)

    def send_message(self, message: Message) -> None:
        """Queue a small message; close the connection when the peer has stopped reading.

        A message of a kind that the peer's version does not know is left out.
        """
        if not is_understood(getattr(message, "type", ""), self.protocol):
            return
        if len(self._messages) >= MAX_QUEUED_MESSAGES:
            log.warning("dropped %s: it does not read what it is sent", self.key[:8])
            self.channel.close("you do not read what you are sent")
        else:
            self._messages.append(message)
        self._message_waits.set()

    def schedule_state(self) -> None:
        """Send our PeerState as soon as the channel takes it.

        It is composed only then, so that a peer that reads slowly gets fewer States and not older
        ones.
        """
        self._state_due = True
        self._message_waits.set()

    def send_own_update(self, author: str, seq: int, rank: float) -> None:
        """Queue a fresh update of this machine, before all but those of lower ranks."""
        if len(self._own_updates) < MAX_QUEUED_TRANSFERS:
            self._own_updates.setdefault((author, seq, True, False), rank)
            self._own_update_waits.set()

    def send_update(
        self, author: str, seq: int, whole: bool = True, is_requested: bool = False
    ) -> None:
        """Queue an update, or only its header.

        It is dropped when too many wait: the peer will ask for it.
        """
        if len(self._updates) < MAX_QUEUED_TRANSFERS:
            self._updates.setdefault((author, seq, whole, is_requested), math.inf)
            self._payload_waits.set()

    def send_blob(self, digest: str, offset: int) -> None:
        """Queue a blob from `offset` on; drop it when too many wait."""
        if len(self._blobs) < MAX_QUEUED_TRANSFERS:
            self._blobs.setdefault((digest, offset), math.inf)
            self._payload_waits.set()

    def send_line_test(self, size: int) -> None:
        """Queue bytes without meaning, by which the line is measured."""
        if len(self._line_tests) < MAX_QUEUED_LINE_TESTS:
            self._line_tests.setdefault((size,), math.inf)
            self._payload_waits.set()

    async def receive(self) -> bytes:
        """Return the next frame, no sooner than this peer's rate limit allows.

        Raises:
            ChannelClosedError: When the connection has ended.
        """
        frame = await self.channel.receive()
        now = asyncio.get_running_loop().time()
        delay = max(
            self._frame_limit.consume(1, now),
            self._byte_limit.consume(len(frame), now),
            # A byte of a header takes much longer to process than a byte of a payload.
            self._header_limit.consume(header_size(frame), now),
        )
        if delay:
            await asyncio.sleep(delay)
        return frame

    async def wait_for_update(self) -> None:
        """Wait until another header of an update may be verified, which holds up this peer only."""
        delay = self._update_limit.consume(1, asyncio.get_running_loop().time())
        if delay:
            await asyncio.sleep(delay)

    async def wait_for_requests(self, count: int) -> None:
        """Wait until so many requested updates may be looked up, which holds up this peer only."""
        delay = self._requested_limit.consume(count, asyncio.get_running_loop().time())
        if delay:
            await asyncio.sleep(delay)

    def record_unwanted(self, size: int) -> None:
        """Record bytes of a payload that nothing here waits for; a few arrive after a decline.

        Raises:
            FloodError: When the peer sends more than can be underway by then.
        """
        now = asyncio.get_running_loop().time()
        if not self._unwanted_limit.try_consume(size, now):
            raise FloodError("it sends payloads that nothing here waits for")

    def update_meters(self, now: float) -> None:
        """Record the bytes sent and received so far, at event loop time `now`."""
        self.sent_meter.update(self.channel.bytes_sent, now)
        self.received_meter.update(self.channel.bytes_received, now)

    def count_packets(self, uplink: FairShare) -> None:
        """Count what packets had beyond frames, since the last call, in the uplink's limit."""
        overhead = max(0, self.channel.bytes_sent - self._counted_bytes)
        self._counted_bytes += overhead
        uplink.record_message(overhead)

    async def run_writers(self, sources: MessageSources) -> None:
        """Send what waits, until cancelled.

        Raises:
            ChannelClosedError: When the connection has ended.
        """
        open_update = partial(sources.open_update, self.key)
        fresh = [_Transfers(self._own_updates, open_update)]
        others = [
            _Transfers(self._updates, open_update),
            _Transfers(self._blobs, partial(sources.open_blob, self.key)),
            _Transfers(self._line_tests, sources.open_line_test),
        ]
        uplink = sources.uplink
        writers = [
            asyncio.create_task(self._write_messages(sources)),
            asyncio.create_task(self._write_payloads(fresh, self._own_update_waits, uplink)),
            asyncio.create_task(self._write_payloads(others, self._payload_waits, uplink)),
        ]
        try:
            await asyncio.gather(*writers)
        finally:
            for writer in writers:
                writer.cancel()

    async def _write_messages(self, sources: MessageSources) -> None:
        """Send messages as soon as the channel takes them: they do not wait for the uplink."""
        while True:
            while self._messages:
                await self._send_message(self._messages.popleft(), sources.uplink)
            if self._state_due:
                self._state_due = False
                state = sources.compose_state(self.key)
                if state is not None:
                    await self._send_message(state, sources.uplink)
                continue
            self._message_waits.clear()
            await self._message_waits.wait()

    async def _send_message(self, message: Message, uplink: FairShare) -> None:
        frame = pack(message)
        uplink.record_message(len(frame))
        await self._send(frame)

    async def _write_payloads(
        self,
        transfers: list["_Transfers"],
        something_waits: asyncio.Event,
        uplink: FairShare,
    ) -> None:
        """Send from several queues in turn, one piece at a time."""
        sender = UplinkSender(uplink)
        while True:
            transfers.append(transfers.pop(0))
            waiting = next((transfer for transfer in transfers if transfer.is_waiting()), None)
            if waiting is None:
                something_waits.clear()
                await something_waits.wait()
                continue
            outgoing = waiting.next_message()
            if outgoing is None:
                sender.end_transfer()
                await asyncio.sleep(0)  # a peer may queue thousands that turn out to be empty
                continue
            sender.start_transfer(waiting.rank)
            frame = pack(*outgoing)
            await sender.wait_for_turn(len(frame))
            with uplink.measure_sending(len(frame)):
                await self._send(frame)
            self.count_packets(uplink)

    async def _send(self, frame: bytes) -> None:
        async with self._write_lock:
            self._counted_bytes += len(frame)
            await self.channel.send(frame)


class _Transfers:
    """Read the messages of queued updates, or of queued blobs, one transfer after the other."""

    def __init__(
        self, queue: dict[Any, float], open_transfer: Callable[..., OutgoingMessages]
    ) -> None:
        self._queue = queue  # arguments of `open_transfer` → rank
        self.rank = math.inf  # of the transfer in progress
        self._open_transfer = open_transfer
        self._messages: OutgoingMessages | None = None

    def is_waiting(self) -> bool:
        """Return whether a transfer is in progress or queued."""
        return self._messages is not None or bool(self._queue)

    def next_message(self) -> tuple[Message, bytes] | None:
        """Return the next message and its payload; None when the transfer in progress has ended."""
        if self._messages is None:
            arguments = next(iter(self._queue))
            self.rank = self._queue.pop(arguments)
            self._messages = self._open_transfer(*arguments)
        outgoing = next(self._messages, None)
        if outgoing is None:
            self._messages = None
        return outgoing
