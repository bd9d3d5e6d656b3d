"""One connected peer: what waits to be sent to it, and who it has shown itself to be.

Each link has its own writers, so a slow peer holds up nobody else: one for messages, which never wait behind more than
one piece of payload, and one for payloads, which takes its turn among all links where the line is capped. What waits is
bounded: small messages in a short queue, a State that is composed when it can go out, and updates and blobs as names,
whose bytes are read from their files piece by piece as the channel drains.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator

from barnraise.exchange.network.framing import pack
from barnraise.exchange.network.rate_limit import FairShare, Meter, TokenBucket
from barnraise.exchange.network.transport import Channel
from barnraise.protocol.messages import Hello, State, Ticket
from barnraise.protocol.types import Message

log = logging.getLogger("barnraise.exchange")

MESSAGES = 8192  # small messages that may wait for one peer
NAMES = 4096  # updates and blobs that may
PIECE_BYTES = 1 << 17  # payload bytes a frame carries here: a State is never stuck behind more
HEARD = (1000.0, 5000.0)  # frames a second that are taken from one peer, and how many at once
TAKEN = (float(128 << 20), float(256 << 20))  # …and bytes

Frames = Iterator[bytes]


class Connection:
    def __init__(self, channel: Channel, hello: Hello, ticket: Ticket, dialled: bool, since: float):
        self.channel, self.hello, self.ticket = channel, hello, ticket
        self.dialled, self.since = dialled, since  # by us; loop time
        self.key = channel.peer
        self.up, self.down = Meter(), Meter()
        self._limits = TokenBucket(*HEARD), TokenBucket(*TAKEN)
        self._messages: deque[Message] = deque()
        self._state_due = False
        self._updates: deque[tuple[str, int, bool]] = deque()
        self._blobs: deque[tuple[str, int]] = deque()
        self._said, self._payload = asyncio.Event(), asyncio.Event()  # something waits
        self._line = asyncio.Lock()  # one frame at a time

    def send_message(self, message: Message) -> None:
        """Queues a small message."""
        if len(self._messages) >= MESSAGES:
            log.warning("dropped %s: it does not read what it is sent", self.key[:8])
            self.channel.close("you do not read what you are sent")
        else:
            self._messages.append(message)
        self._said.set()

    def schedule_state(self) -> None:
        """Has our State sent, composed once it can go out: a peer that reads slowly gets fewer, not older ones."""
        self._state_due = True
        self._said.set()

    def send_update(self, author: str, seq: int, whole: bool = True) -> None:
        """Queues an update, or its header alone. When too many wait it is let go: the peer will ask."""
        if (author, seq, whole) not in self._updates and len(self._updates) < NAMES:
            self._updates.append((author, seq, whole))
            self._payload.set()

    def send_blob(self, digest: str, offset: int) -> None:
        """Queues a blob, from an offset on."""
        if (digest, offset) not in self._blobs and len(self._blobs) < NAMES:
            self._blobs.append((digest, offset))
            self._payload.set()

    async def receive(self) -> bytes:
        """The next frame, no sooner than this peer may send one. Raises ChannelClosed."""
        frame = await self.channel.receive()
        now = asyncio.get_running_loop().time()
        frames, size = self._limits
        if wait := max(frames.consume(1, now), size.consume(len(frame), now)):
            await asyncio.sleep(wait)
        return frame

    def measure(self, now: float) -> None:
        self.up.update(self.channel.bytes_sent, now)
        self.down.update(self.channel.bytes_received, now)

    async def write(
        self,
        state: Callable[[], State | None],
        update: Callable[[str, int, bool], Frames],
        blob: Callable[[str, int], Frames],
        turns: FairShare,
    ) -> None:
        """Sends what waits, for ever. Raises ChannelClosed."""
        writers = [
            asyncio.create_task(self._speak(state)),
            asyncio.create_task(self._carry(update, blob, turns)),
        ]
        try:
            await asyncio.gather(*writers)
        finally:
            for writer in writers:
                writer.cancel()

    async def _speak(self, state: Callable[[], State | None]) -> None:
        while True:
            while self._messages:
                await self._send(pack(self._messages.popleft()))
            if self._state_due:
                self._state_due = False
                if told := state():
                    await self._send(pack(told))
                continue
            self._said.clear()
            await self._said.wait()

    async def _carry(self, update, blob, turns: FairShare) -> None:
        """Updates and blobs by turns, a piece at a time."""
        streams: dict[str, Frames | None] = {"update": None, "blob": None}
        waiting = {"update": (self._updates, update), "blob": (self._blobs, blob)}
        kinds = ["update", "blob"]
        while True:
            kinds.reverse()
            for kind in kinds:
                queue, opened = waiting[kind]
                if streams[kind] is None and queue:
                    streams[kind] = opened(*queue.popleft())
                if (stream := streams[kind]) is not None:
                    if (frame := next(stream, None)) is None:
                        streams[kind] = None
                    else:
                        await turns.wait_for_turn(len(frame))
                        with turns.measure_sending(len(frame)):
                            await self._send(frame)
                    break
            else:
                self._payload.clear()
                await self._payload.wait()

    async def _send(self, frame: bytes) -> None:
        async with self._line:
            await self.channel.send(frame)
