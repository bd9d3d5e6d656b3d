"""One machine's channels to the others of its crew, on an event loop.

The code that forms a crew dials, greets and dials again: `serve` takes an open channel of a machine
in the roster, and returns when it has ended. Control messages go before payloads, whose pieces
share this machine's uplink.
"""

import asyncio
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from barnraise.errors import CrewError, MessageError
from barnraise.mixing.payloads import Payload
from barnraise.peering.limits.rate_limit import PIECE_BYTES, FairShare, UplinkSender
from barnraise.peering.transports.transport import Channel, ChannelClosedError
from barnraise.spec.architecture import FP32_BYTES
from barnraise.training.crew import crew_frames
from barnraise.training.crew.crew_frames import CrewPiece, PayloadId, PieceInbox, PieceKind
from barnraise.training.crew.crew_messages import (
    MAX_ATTACHMENTS,
    MAX_PARTS,
    ControlMessage,
    CrewHello,
    Ping,
    Recall,
    StepDecision,
    StepMessage,
)
from barnraise.training.crew.roster import LEAD, CrewRoster

log = logging.getLogger("barnraise")

PING_SECONDS = 3.0  # after which a channel that sends nothing else carries a sign of life
SILENCE_SECONDS = 10.0  # after which a machine that sends nothing counts as gone
POLL_SECONDS = 0.05  # between two questions whether to stop waiting
MAX_WAITING = 1000  # control messages of one machine that wait to be read
MAX_FAULTS = 3  # of a machine, with which it is left out of the crew
LEFT_OUT = (
    f"{MAX_FAULTS} times it sent what is not finite, or not what its digest says: its memory or "
    "its line damages data"
)
ATTACHMENT_OVERHEAD = 1 << 16  # bytes of a payload beyond those of both of Adam's moments


@dataclass
class _CrewLink:
    """One channel, and what waits to be sent over it."""

    channel: Channel
    inbox: PieceInbox
    messages: deque[ControlMessage] = field(default_factory=deque)  # to be sent
    payloads: deque[tuple[PayloadId, Payload]] = field(default_factory=deque)
    has_work: asyncio.Event = field(default_factory=asyncio.Event)


class ChannelWatch:
    """Remember which channels are open, to notice that one has ended since, or was replaced."""

    def __init__(self, links: "CrewLinks", numbers: Collection[int]) -> None:
        """Watch the channels to these machines."""
        self._links = links
        self._channels = {number: links.opened(number) for number in numbers}

    def find_ended(self) -> int | None:
        """Return a machine whose channel has ended; None if none has."""
        links, connected = self._links, self._links.connected()
        ended = (n for n, c in self._channels.items() if n not in connected or links.opened(n) != c)
        return next(ended, None)


class CrewLinks:
    """Send messages and payloads to the other machines of a crew, and collect theirs.

    Public methods are for the training loop's thread, except `serve`. Machines are named by their
    numbers in the roster.

    Attributes:
        roster: the crew.
        number: this machine's.
        bytes_sent: of payloads.
        bytes_received: of payloads.
        is_recalled: whether the lead wants this machine to apply for a seat again.
        dropped: machines without which the lead goes on until the blocks are dealt again.
        faults: how often each machine, by key, has sent what is of no use; only the lead counts.
    """

    def __init__(
        self,
        roster: CrewRoster,
        number: int,
        loop: asyncio.AbstractEventLoop,
        uplink: FairShare | None = None,
        faults: Counter[str] | None = None,
        dropped: set[int] | None = None,
    ) -> None:
        """Expect channels; they are served on `loop`. Without `uplink` nothing limits them."""
        roster.validate()
        self.faults = Counter[str]() if faults is None else faults
        self.roster, self.number = roster, number
        self.bytes_sent = 0
        self.bytes_received = 0
        self._received: dict[int, deque[ControlMessage]] = {
            n: deque() for n in range(len(roster.seats))
        }
        self._loop, self._uplink = loop, uplink or FairShare()
        self._links: dict[int, _CrewLink] = {}
        self._opened = dict.fromkeys(self._received, 0)  # channels so far
        self._ends: dict[int, str] = {}  # why the last channel has ended
        self._order = 0  # of this machine; payloads of earlier ones are void
        self._last_decisions: dict[int, StepDecision] = {}  # by machine
        self._session = secrets.token_hex(8)
        self._sessions: dict[int, str] = {}  # of each machine, as its last channel has stated it
        self._accepted_sessions: dict[int, str] = {}
        self.is_recalled = False  # the lead deals the blocks again
        self.dropped = set[int]() if dropped is None else dropped
        self._changed = threading.Condition()
        elements = max(fragment.size for fragment in roster.model.fragments())
        self._max_attachment = 2 * FP32_BYTES * elements + ATTACHMENT_OVERHEAD

    # ---- the training loop's side ---------------------------------------------------------------

    def connected(self) -> set[int]:
        """Return the machines with an open channel."""
        return set(self._links) - self.dropped

    def opened(self, number: int) -> int:
        """Return how many channels to a machine have been opened so far."""
        return self._opened[number]

    def reason(self, number: int) -> str:
        """Return a clause that says why a machine has no channel."""
        return self._ends.get(number, "it has not connected")

    def find_restarted(self) -> int | None:
        """Return a machine that has restarted since `accept_restarts`; None if none has.

        What it had learnt in this round is lost.
        """
        with self._changed:
            accepted = self._accepted_sessions
            restarted = (n for n, s in self._sessions.items() if s != accepted.get(n))
            return next((n for n in restarted if n not in self.dropped), None)

    def accept_restarts(self) -> None:
        """Go on with the machines as they are: all of them load a saved state."""
        with self._changed:
            self._accepted_sessions = dict(self._sessions)

    def record_fault(self, number: int) -> None:
        """Count that a machine has sent what is of no use."""
        self.faults[self.roster.seats[number].key] += 1

    def find_left_out(self) -> int | None:
        """Return a member that has sent what is of no use too often; None if there is none."""
        numbers = set(range(1, len(self.roster.seats))) - self.dropped
        return next((n for n in numbers if self.is_left_out(self.roster.seats[n].key)), None)

    def is_left_out(self, key: str) -> bool:
        """Return whether the machine with this key gets no seat any longer."""
        return self.faults[key] >= MAX_FAULTS

    def start_order(self, order: int) -> None:
        """Begin an order, or a step: payloads of earlier ones are neither sent nor received."""
        with self._changed:
            self._order = order
            for link in self._links.values():
                link.inbox.start_order(order)

    def send(self, number: int, message: ControlMessage) -> None:
        """Send a control message, if a machine has a channel."""
        self._call(self._queue_message, number, message)

    def send_decision(self, decision: StepDecision, machines: Collection[int]) -> None:
        """Send a decision on the step of some machines.

        One whose channel breaks gets it with the next one, also if other steps were without it.
        """
        with self._changed:
            self._last_decisions |= dict.fromkeys(machines, decision)
        for number in machines:
            self.send(number, decision)

    def send_payload(self, number: int, of: PayloadId, payload: Payload) -> None:
        """Send a payload in pieces, if a machine has a channel; nothing may change it meanwhile."""
        self._call(self._queue_payload, number, of, payload)

    def wait(
        self,
        is_done: Callable[[], bool],
        seconds: float,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait until something holds, which is asked under the lock after each change.

        Returns:
            Whether it holds; False when the time is over or the wait was stopped.
        """
        ends_at = time.monotonic() + seconds
        while True:
            left = ends_at - time.monotonic()
            with self._changed:
                if self._changed.wait_for(is_done, max(0.0, min(left, POLL_SECONDS))):
                    return True
            if left <= 0 or should_stop():
                return False

    def pop_message(
        self, number: int, is_wanted: Callable[[ControlMessage], bool] = lambda message: True
    ) -> ControlMessage | None:
        """Remove and return the first message of a machine that is wanted; None if none is here."""
        with self._changed:
            messages = self._received[number]
            found = next((message for message in messages if is_wanted(message)), None)
            if found is not None:
                messages.remove(found)
            return found

    def has_message(
        self, number: int, is_wanted: Callable[[ControlMessage], bool] = lambda message: True
    ) -> bool:
        """Return whether a message of a machine that is wanted waits to be read."""
        with self._changed:
            return any(is_wanted(message) for message in self._received[number])

    def has_payload(self, number: int, of: PayloadId) -> bool:
        """Return whether a machine's payload is here."""
        link = self._links.get(number)
        return link is not None and link.inbox.has(of)

    def pop_payload(self, number: int, of: PayloadId) -> bytearray | None:
        """Remove and return a machine's payload; None if it is not here."""
        with self._changed:
            link = self._links.get(number)
            return link.inbox.pop(of) if link is not None and link.inbox.has(of) else None

    def end_link(self, number: int, reason: str) -> None:
        """Close the channel to a machine that has sent what is wrong."""
        with self._changed:
            self._ends[number] = reason
        self._call(self._close_link, number, reason)

    def drop(self, number: int) -> None:
        """Go on without a machine, which applies for a seat again."""
        with self._changed:
            self.dropped.add(number)
        self.end_link(number, "the crew goes on without it")

    def close(self, reason: str) -> None:
        """Close all channels."""
        for number in range(len(self.roster.seats)):
            self._call(self._close_link, number, reason)

    def _call(self, function: Callable[..., None], *values: object) -> None:
        """Have the event loop call a function, without waiting.

        Raises:
            CrewError: the event loop has ended.
        """
        try:
            self._loop.call_soon_threadsafe(function, *values)
        except RuntimeError:
            raise CrewError("the crew's channels are closed") from None

    # ---- the event loop's side ------------------------------------------------------------------

    async def serve(self, channel: Channel, first: bytes | None = None) -> None:
        """Send and receive over an open channel until it ends; it takes the place of an older one.

        Args:
            channel: to a machine in the roster.
            first: its first frame, if that was read before.

        Raises:
            MessageError: the other side is not of this crew, or needs no channel to this machine.
        """
        number = self.roster.find_seat(channel.peer)
        if number is None or number not in self.roster.neighbours(self.number):
            raise MessageError("it has no place next to this machine in the crew")
        link = self._open_link(number, channel)
        writer = asyncio.create_task(self._write(link))
        reason = "it left"
        try:
            while True:
                frame = first or await asyncio.wait_for(channel.receive(), SILENCE_SECONDS)
                first = None
                self._accept(number, link, frame)
        except MessageError as error:
            reason = str(error)
            log.warning("ended the channel to %s: %s", self.roster.name_of(number), reason)
        except TimeoutError:
            reason = f"nothing came from it for {SILENCE_SECONDS:.0f} s"
        except ChannelClosedError as error:
            reason = str(error) or reason
        finally:
            writer.cancel()
            channel.close(reason)
            self._forget_link(number, link, reason)

    def _open_link(self, number: int, channel: Channel) -> _CrewLink:
        inbox = PieceInbox(lambda of, total: self._check_payload(number, of, total))
        link = _CrewLink(channel, inbox)
        older = self._links.get(number)
        if older is not None:
            older.channel.close("replaced by a newer channel")
        with self._changed:
            inbox.start_order(self._order)
            self._links[number] = link
            self._ends.pop(number, None)
            self._opened[number] += 1
            link.messages.append(CrewHello(epoch=self.roster.epoch, session=self._session))
            if number in self._last_decisions:
                link.messages.append(self._last_decisions[number])
            link.has_work.set()
            self._changed.notify_all()
        return link

    def _forget_link(self, number: int, link: _CrewLink, reason: str) -> None:
        with self._changed:
            if self._links.get(number) is link:
                del self._links[number]
                self._ends.setdefault(number, reason)
            self._changed.notify_all()

    def _accept(self, number: int, link: _CrewLink, frame: bytes) -> None:
        """Store what a machine has sent.

        Raises:
            MessageError: it contradicts the protocol.
        """
        found = crew_frames.unpack(frame)
        if isinstance(found, Ping):
            return
        if isinstance(found, Recall):
            self.is_recalled = self.is_recalled or number == LEAD
            raise MessageError("the lead deals the blocks again")
        if not isinstance(found, CrewPiece | StepMessage):
            raise MessageError("it sent what belongs to the forming of a crew")
        if isinstance(found, CrewHello) and found.epoch == self.roster.epoch:
            self._accept_session(number, found.session)
            return
        if found.epoch != self.roster.epoch:
            raise MessageError("it sent what belongs to another roster")
        with self._changed:
            if isinstance(found, CrewPiece):
                self.bytes_received += len(found.data)
                if not link.inbox.accept(found):
                    return
            else:
                if len(self._received[number]) >= MAX_WAITING:
                    raise MessageError("it sent more messages than any order needs")
                self._received[number].append(found)
            self._changed.notify_all()

    def _accept_session(self, number: int, session: str) -> None:
        with self._changed:
            self._sessions[number] = session
            self._accepted_sessions.setdefault(number, session)
            self._changed.notify_all()

    def _check_payload(self, number: int, of: PayloadId, total: int) -> None:
        """Raise MessageError unless a machine may send a payload of so many bytes."""
        roster = self.roster
        match of.kind:
            case PieceKind.ATTACHMENT:
                is_allowed = LEAD in (number, self.number) and of.part < MAX_ATTACHMENTS
                is_allowed = is_allowed and of.key == 0 and total <= self._max_attachment
            case PieceKind.BOUNDARY:
                is_allowed = roster.is_boundary(of.key, number, self.number)
                is_allowed = is_allowed and of.part < roster.micro_batches
                is_allowed = is_allowed and total == roster.boundary_bytes(number)
            case PieceKind.STREAM:
                is_allowed = of.key > 0 and roster.is_boundary(of.key, number, self.number)
                sequence = FP32_BYTES * roster.model.context * roster.model.width
                is_allowed = is_allowed and of.part < MAX_PARTS
                is_allowed = is_allowed and total % sequence == 0
                is_allowed = is_allowed and total <= roster.sequences * sequence
        if not is_allowed:
            raise MessageError("it sent a payload that the crew's roster does not imply")

    def _queue_message(self, number: int, message: ControlMessage) -> None:
        link = self._links.get(number)
        if link is not None:
            link.messages.append(message)
            link.has_work.set()

    def _queue_payload(self, number: int, of: PayloadId, payload: Payload) -> None:
        link = self._links.get(number)
        if link is not None:
            link.payloads.append((of, payload))
            link.has_work.set()

    def _close_link(self, number: int, reason: str) -> None:
        link = self._links.get(number)
        if link is not None:
            link.channel.close(reason)

    async def _write(self, link: _CrewLink) -> None:
        """Send what is queued. An error of this program ends the channel."""
        sender = UplinkSender(self._uplink)
        try:
            while True:
                await self._write_messages(link)
                while link.payloads:
                    of, payload = link.payloads.popleft()
                    await self._write_payload(link, sender, of, payload)
                    sender.end_transfer()
                link.has_work.clear()
                if link.messages:
                    continue
                try:
                    await asyncio.wait_for(link.has_work.wait(), PING_SECONDS)
                except TimeoutError:
                    link.messages.append(Ping())
        except ChannelClosedError:
            pass  # the reader finds the reason
        except Exception as error:
            log.critical("sending to %s failed", link.channel.peer[:8], exc_info=True)
            link.channel.close(f"sending failed: {error}")
        finally:
            sender.end_transfer()

    async def _write_messages(self, link: _CrewLink) -> None:
        while link.messages:
            await link.channel.send(crew_frames.pack_control(link.messages.popleft()))

    async def _write_payload(
        self, link: _CrewLink, sender: UplinkSender, of: PayloadId, payload: Payload
    ) -> None:
        """Send a payload's pieces, and messages between them; stop once its order is over."""
        view = memoryview(payload)
        for offset in range(0, len(view), PIECE_BYTES):
            if of.number < self._order:
                return
            data = view[offset : offset + PIECE_BYTES]
            await sender.wait_for_turn(len(data))
            piece = CrewPiece(self.roster.epoch, of, len(view), offset, data)
            await link.channel.send(piece.pack())
            self.bytes_sent += len(data)
            await self._write_messages(link)
