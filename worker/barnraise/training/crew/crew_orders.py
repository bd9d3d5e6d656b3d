"""The lead's numbered orders: sent until each machine has answered, executed once."""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from barnraise.errors import CrewError, RoundLostError
from barnraise.mixing.payloads import Payload
from barnraise.training.crew.crew_frames import PayloadId, PieceKind
from barnraise.training.crew.crew_links import LEFT_OUT, CrewLinks
from barnraise.training.crew.crew_messages import Attachment, Order, Reply, StepTask, Task

log = logging.getLogger("barnraise")

CONNECT_SECONDS = 300.0  # in which all members have planned, allocated and connected
RETURN_SECONDS = 30.0  # for which the lead waits for a machine whose channel has ended
SHARED_SECONDS = 3.0  # the same where its span has another holder
ANSWER_SECONDS = 0.5  # between two looks at the channels
ANNOUNCE_SECONDS = 2.0  # for which answers are awaited that change nothing
MAX_SENDS = 5  # of one order to one machine, whose channel breaks each time


@dataclass(frozen=True)
class Enclosure:
    """Bytes of a fragment that go with an order or a reply.

    Attributes:
        fragment: which they belong to.
        payload: the bytes.
        update: which of several updates they are a part of.
        multiplier: -1 where their units are subtracted.
    """

    fragment: int
    payload: Payload
    update: int = 0
    multiplier: int = 1

    def attachment(self) -> Attachment:
        """Return what announces the bytes."""
        return Attachment.model_validate(
            {
                "fragment": self.fragment,
                "size": len(self.payload),
                "digest": digest_of(self.payload),
                "update": self.update,
                "multiplier": self.multiplier,
            }
        )


@dataclass(frozen=True)
class Answer:
    """What a machine has answered to an order.

    Attributes:
        reply: its message.
        payloads: the bytes of its attachments.
    """

    reply: Reply
    payloads: Sequence[bytearray]


@dataclass
class _Pending:
    """An order that one machine has not answered yet."""

    enclosures: Sequence[Enclosure]
    channel: int = -1  # the number of the channel over which it was sent; -1: not sent
    reply: Reply | None = None  # whose attachments may still be on their way
    sends: int = 0
    gone_since: float | None = None


@dataclass
class SentOrder:
    """An order on its way, see `CrewOrders.start`."""

    order: int
    task: Task
    pending: dict[int, _Pending]
    answers: dict[int, Answer] = field(default_factory=dict)


class CrewOrders:
    """Send orders to the other machines of the crew, and wait for their answers."""

    def __init__(self, links: CrewLinks) -> None:
        """Send over `links`; the numbers are beyond those of a lead that was here before."""
        self.links = links
        self._number = int(1000 * time.time())

    @property
    def others(self) -> list[int]:
        """Return the numbers of all machines but the lead and those that have been dropped."""
        return [n for n in range(1, len(self.links.roster.seats)) if n not in self.links.dropped]

    def first_holder(self, index: int) -> int:
        """Return the first machine that holds a fragment, of those that were not dropped."""
        roster = self.links.roster
        span = roster.span_of(roster.holders[index])
        return next(number for number in span if number not in self.links.dropped)

    def next_order(self) -> int:
        """Return the number of a step, for `send_step`."""
        self._number += 1
        return self._number

    def send_step(self, order: int, task: StepTask, machines: Collection[int]) -> None:
        """Order machines to make a step; no answer is awaited."""
        for number in machines:
            self._send(number, order, task, ())

    def request(
        self,
        task: Task,
        machines: Collection[int] | None = None,
        enclosures: Mapping[int, Sequence[Enclosure]] | None = None,
    ) -> dict[int, Answer]:
        """Send an order, and wait until all machines have executed it; see `collect`."""
        return self.collect(self.start(task, machines, enclosures))

    def request_holder(self, index: int, task: Task) -> Answer:
        """Have a machine that holds a fragment execute an order, and return its answer."""
        while True:
            number = self.first_holder(index)
            answers = self.request(task, [number])
            if number in answers:
                return answers[number]

    def announce(self, task: Task) -> None:
        """Send an order to the machines that have a channel; wait for their answers briefly."""
        ends_at = time.monotonic() + ANNOUNCE_SECONDS
        sent = self.start(task, self.links.connected())
        with contextlib.suppress(CrewError):
            self.collect(sent, lambda: time.monotonic() > ends_at)

    def start(
        self,
        task: Task,
        machines: Collection[int] | None = None,
        enclosures: Mapping[int, Sequence[Enclosure]] | None = None,
    ) -> SentOrder:
        """Send an order to some machines, or to all, with what goes along for each of them."""
        self._number += 1
        self.links.start_order(self._number)
        machines = set(self.others if machines is None else machines) - self.links.dropped
        sent = SentOrder(
            self._number, task, {n: _Pending((enclosures or {}).get(n, ())) for n in machines}
        )
        self._send_pending(sent)
        return sent

    def collect(
        self, sent: SentOrder, should_stop: Callable[[], bool] = lambda: False
    ) -> dict[int, Answer]:
        """Wait for the answers to an order, and send it again over channels that have broken.

        Returns:
            The answer of each machine; not all of them if the wait was stopped, or if a machine was
            dropped meanwhile.

        Raises:
            CrewError: a machine whose span has no other holder is gone for RETURN_SECONDS, could
                not obey, or has restarted.
        """
        while not self.links.wait(lambda: self._read_answers(sent), ANSWER_SECONDS, should_stop):
            if should_stop():
                break
            self.check_members()
            self._send_pending(sent)
        self.check_members()
        return sent.answers

    def check_members(self) -> None:
        """Check that the crew can go on with all machines, or without some.

        Raises:
            RoundLostError: one has restarted since the crew's state was loaded.
            CrewError: one is to be left out, because of what it sent.
        """
        roster = self.links.roster
        while (left_out := self.links.find_left_out()) is not None:
            problem = f"{roster.name_of(left_out)} is left out of the crew: {LEFT_OUT}"
            self._drop(left_out, CrewError(problem))
        while (restarted := self.links.find_restarted()) is not None:
            problem = f"{roster.name_of(restarted)} of this crew has restarted"
            self._drop(restarted, RoundLostError(problem))

    def _drop(self, number: int, error: CrewError) -> None:
        """Go on without a machine if another one holds its span; else raise the error."""
        if not self._has_substitute(number):
            raise error
        self.links.drop(number)
        log.warning("%s: the crew goes on without it, because its blocks are elsewhere too", error)

    def _has_substitute(self, number: int) -> bool:
        """Return whether another machine that holds the same span has a channel."""
        others = set(self.links.roster.span_of(number)) - {number}
        return not others.isdisjoint(self.links.connected())

    def _send_pending(self, sent: SentOrder) -> None:
        """Send an order over each channel over which it was not sent yet.

        Raises:
            CrewError: a machine is gone for too long, or its channel breaks again and again.
        """
        links, roster, now = self.links, self.links.roster, time.monotonic()
        connected = links.connected()
        for number, pending in list(sent.pending.items()):
            if number in links.dropped:
                del sent.pending[number]
                continue
            if number not in connected:
                pending.gone_since = pending.gone_since or now
                patience = SHARED_SECONDS if self._has_substitute(number) else RETURN_SECONDS
                if now - pending.gone_since > patience:
                    problem = f"{roster.name_of(number)} of this crew is gone: "
                    self._drop(number, CrewError(problem + links.reason(number)))
                continue
            pending.gone_since = None
            if pending.channel != links.opened(number):
                pending.channel, pending.reply = links.opened(number), None
                pending.sends += 1
                if pending.sends > MAX_SENDS:
                    problem = (
                        f"the channel to {roster.name_of(number)} of this crew broke {MAX_SENDS} "
                        f"times during one order: the last time because {links.reason(number)}"
                    )
                    self._drop(number, CrewError(problem))
                    continue
                self._send(number, sent.order, sent.task, pending.enclosures)

    def _send(self, number: int, order: int, task: Task, enclosures: Sequence[Enclosure]) -> None:
        links = self.links
        attachments = [each.attachment() for each in enclosures]
        message = Order(epoch=links.roster.epoch, number=order, task=task, attachments=attachments)
        links.send(number, message)
        send_enclosures(links, number, order, enclosures)

    def _read_answers(self, sent: SentOrder) -> bool:
        """Read the replies to an order; return whether all machines have answered.

        Raises:
            CrewError: a machine could not obey.
        """
        for number, pending in list(sent.pending.items()):
            self._read_reply(number, sent, pending)
            if pending.reply is None:
                continue
            payloads = pop_attachments(self.links, number, sent.order, pending.reply.attachments)
            if payloads is not None:
                sent.answers[number] = Answer(pending.reply, payloads)
                del sent.pending[number]
        return not sent.pending

    def _read_reply(self, number: int, sent: SentOrder, pending: _Pending) -> None:
        while (message := self.links.pop_message(number)) is not None:
            if not isinstance(message, Reply) or message.number != sent.order:
                continue  # of an earlier order, or a step
            if message.problem:
                problem = f"{self.links.roster.name_of(number)}: {message.problem}"
                self._drop(number, CrewError(problem))
                return
            pending.reply = message


def digest_of(payload: Payload) -> str:
    """Return the digest by which another machine checks a payload."""
    return blake3(payload).hexdigest()


def send_enclosures(
    links: CrewLinks, number: int, order: int, enclosures: Sequence[Enclosure]
) -> None:
    """Send the bytes that an order or a reply has announced."""
    for part, each in enumerate(enclosures):
        links.send_payload(number, PayloadId(PieceKind.ATTACHMENT, order, part), each.payload)


def pop_attachments(
    links: CrewLinks, number: int, order: int, attachments: Sequence[Attachment]
) -> list[bytearray] | None:
    """Remove and return the bytes that a message has announced; None if not all are here.

    What differs from its digest ends the channel: it is sent again over the next one.
    """
    ids = [PayloadId(PieceKind.ATTACHMENT, order, part) for part in range(len(attachments))]
    if not all(links.has_payload(number, of) for of in ids):
        return None
    payloads: list[bytearray] = []
    for of, attachment in zip(ids, attachments, strict=True):
        payload = links.pop_payload(number, of)
        if payload is None:
            return None
        if len(payload) != attachment.size or digest_of(payload) != attachment.digest:
            links.record_fault(number)
            links.end_link(number, "a payload is not what its digest says")
            return None
        payloads.append(payload)
    return payloads
