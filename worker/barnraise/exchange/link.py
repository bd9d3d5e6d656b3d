"""One connected peer: what waits to be sent to it, and who it has shown itself to be.

Each link has its own writer, so a slow peer holds up nobody else. What waits is bounded: small messages in a short
queue, the newest State only, and updates and blobs as names, whose bytes are read from their files piece by piece as
the channel drains.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator

from barnraise.exchange.frames import pack
from barnraise.exchange.transport import Channel
from barnraise.wire import Hello, Message, State, Ticket

log = logging.getLogger("barnraise.exchange")

MESSAGES = 8192  # small messages that may wait for one peer
NAMES = 4096  # updates and blobs that may
PIECE = 1 << 18  # payload bytes a frame carries here: a State is never stuck behind more

Frames = Iterator[bytes]


class Link:
    def __init__(self, channel: Channel, hello: Hello, ticket: Ticket, dialled: bool, since: float):
        self.channel, self.hello, self.ticket = channel, hello, ticket
        self.dialled, self.since = dialled, since  # by us; loop time
        self.key = channel.peer
        self._messages: deque[Message] = deque()
        self._state: State | None = None
        self._updates: deque[tuple[str, int, bool]] = deque()
        self._blobs: deque[tuple[str, int]] = deque()
        self._wake = asyncio.Event()

    def post(self, message: Message) -> None:
        """Queues a small message. A State replaces one that has not gone out."""
        if isinstance(message, State):
            self._state = message
        elif len(self._messages) >= MESSAGES:
            log.warning("dropped %s: it does not read what it is sent", self.key[:8])
            self.channel.close("you do not read what you are sent")
        else:
            self._messages.append(message)
        self._wake.set()

    def push(self, author: str, seq: int, whole: bool = True) -> None:
        """Queues an update, or its header alone. When too many wait it is let go: the peer will ask."""
        if (author, seq, whole) not in self._updates and len(self._updates) < NAMES:
            self._updates.append((author, seq, whole))
            self._wake.set()

    def give(self, digest: str, offset: int) -> None:
        """Queues a blob, from an offset on."""
        if (digest, offset) not in self._blobs and len(self._blobs) < NAMES:
            self._blobs.append((digest, offset))
            self._wake.set()

    async def write(self, update: Callable[[str, int, bool], Frames], blob: Callable[[str, int], Frames]) -> None:
        """Sends what waits, for ever: messages first, then updates and blobs by turns. Raises ChannelClosed."""
        streams = {"update": None, "blob": None}
        waiting = {"update": (self._updates, update), "blob": (self._blobs, blob)}
        turn = ["update", "blob"]
        while True:
            if self._messages or self._state:
                await self._send_messages()
                continue
            turn.reverse()
            for kind in turn:
                queue, opened = waiting[kind]
                if streams[kind] is None and queue:
                    streams[kind] = opened(*queue.popleft())
                if streams[kind] is not None:
                    if (frame := next(streams[kind], None)) is None:
                        streams[kind] = None
                    else:
                        await self.channel.send(frame)
                    break
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _send_messages(self) -> None:
        while self._messages:
            await self.channel.send(pack(self._messages.popleft()))
        if self._state:
            state, self._state = self._state, None
            await self.channel.send(pack(state))
