"""Measure the line to a peer with bytes without meaning, and let peers measure theirs.

One machine requests bytes in a few growing steps, then sends as many; `line_meter` bounds both. The
other serves one test at a time, and few of each key, of each network and in all. What it sends
waits for its uplink like all payloads.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from barnraise.errors import MessageError
from barnraise.peering.addresses.addresses import host_of, network_of
from barnraise.peering.limits.service_budget import ServiceBudget
from barnraise.peering.limits.service_limits import Service
from barnraise.peering.links.bandwidth_meter import PART_BYTES, LineMeter, LineRates, StepMeter
from barnraise.peering.links.connection import Connection, OutgoingMessages
from barnraise.peering.links.received import MessageHandlers, Received
from barnraise.protocol.ip_addresses import is_public_host
from barnraise.protocol.messages import (
    MAX_LINE_TEST_BYTES,
    LineTestPart,
    LineTestReceipt,
    LineTestRequest,
)

SERVED_SECONDS = 12.0  # that one test may last
STEP_LIMIT_SECONDS = 5.0  # in which a step's bytes, or their receipt, must have arrived


@dataclass
class _Served:
    """A test of a peer that this machine serves.

    Attributes:
        key: The peer's.
        ends_at: Event loop time at which another test may begin.
        requested: Bytes that the peer has requested so far.
        received: Bytes that it has sent so far.
        meter: Of its current step.
    """

    key: str
    ends_at: float
    requested: int = 0
    received: int = 0
    meter: StepMeter = field(default_factory=StepMeter)


@dataclass
class _Step:
    """A step of this machine's own test.

    Attributes:
        connection: To the peer.
        is_down: Whether the peer sends the bytes.
        missing: Bytes of a download that have not arrived.
        ended: Resolved with what the step's receiver measured; None if the peer refuses.
        meter: What arrives here of a download.
    """

    connection: Connection
    is_down: bool
    missing: int
    ended: asyncio.Future[StepMeter | None]
    meter: StepMeter = field(default_factory=StepMeter)

    def is_open(self, connection: Connection) -> bool:
        """Return whether the step waits for what arrives over a connection."""
        return self.connection is connection and not self.ended.done()


def line_test_messages(size: int) -> OutgoingMessages:
    """Yield messages with bytes without meaning; random ones, which nothing compresses."""
    left = size
    while left > 0:
        part = min(left, PART_BYTES)
        left -= part
        yield LineTestPart(is_last=not left), os.urandom(part)


class LineTest:
    """Send and serve tests of the line between two peers."""

    def __init__(self, connections: Mapping[str, Connection]) -> None:
        """Test the lines to connected peers, by key."""
        self._connections = connections
        self._budget = ServiceBudget(Service.LINE_TESTS)
        self._served: _Served | None = None
        self._step: _Step | None = None
        self._late: _Step | None = None  # a download that took too long, and still arrives

    def message_handlers(self) -> MessageHandlers:
        """Return what receives each type of message."""
        return {
            LineTestRequest: self.on_request,
            LineTestPart: self.on_part,
            LineTestReceipt: self.on_receipt,
        }

    # ---- this machine measures

    async def measure(self) -> LineRates:
        """Measure the line to a connected peer; rates of 0 if there is none, or it refuses."""
        connections = sorted(self._connections.values(), key=_is_on_internet, reverse=True)
        for connection in connections:
            if connection.channel.is_relayed or self._step is not None:
                continue
            down = await self._measure(connection, is_down=True)
            if down:
                return LineRates(await self._measure(connection, is_down=False), down)
        return LineRates()

    async def _measure(self, connection: Connection, is_down: bool) -> float:
        """Return bytes per second of one direction; 0 if the peer refuses or is gone."""
        clock = asyncio.get_running_loop().time
        line = LineMeter(MAX_LINE_TEST_BYTES)
        while size := line.next_step():
            began_at = clock()
            ended = asyncio.get_running_loop().create_future()
            step = self._step = _Step(connection, is_down, size, ended)
            if is_down:
                connection.send_message(LineTestRequest(size=size))
            else:
                connection.send_line_test(size)
            try:
                async with asyncio.timeout(STEP_LIMIT_SECONDS):
                    measured = await step.ended
            except TimeoutError:  # the line is so slow that what has arrived is a measurement
                measured = step.meter if is_down and step.meter.size else None
                line.elapsed = STEP_LIMIT_SECONDS
            finally:
                self._step = None
                if is_down and ended.cancelled() and step.missing < size:
                    self._late = step
            if measured is None:
                break
            line.on_step(size, measured, clock() - began_at)
        return line.rate

    def on_receipt(self, received: Received[LineTestReceipt]) -> None:
        """Receive what a peer measured of this machine's bytes, or that it refuses."""
        connection, receipt = received.connection, received.message
        step = self._step
        if step is None or not step.is_open(connection):
            return
        if step.is_down and receipt.size:
            return  # of an earlier upload: a download has none, and can only be refused
        step.ended.set_result(StepMeter(receipt.size, receipt.seconds) if receipt.size else None)

    # ---- peers measure

    def on_request(self, received: Received[LineTestRequest]) -> None:
        """Send bytes to a peer, if it may test its line now."""
        connection, request, now = received.connection, received.message, received.at
        served = self._served
        if served is None or served.key != connection.key or now >= served.ends_at:
            is_busy = served is not None and now < served.ends_at
            if is_busy or not self._may_serve(connection, now):
                connection.send_message(LineTestReceipt(size=0, seconds=0))
                return
            served = self._served = _Served(connection.key, now + SERVED_SECONDS)
        served.requested += request.size
        if served.requested > MAX_LINE_TEST_BYTES:
            connection.send_message(LineTestReceipt(size=0, seconds=0))
        else:
            connection.send_line_test(request.size)

    def _may_serve(self, connection: Connection, now: float) -> bool:
        network = network_of(connection.channel.remote_address)
        return self._budget.try_consume({"key": connection.key, "network": network}, now)

    # ---- both

    def on_part(self, received: Received[LineTestPart]) -> None:
        """Receive bytes of a test.

        Raises:
            MessageError: When the peer sends more than a test has.
        """
        connection, part, now = received.connection, received.message, received.at
        size = len(received.payload)
        if self._is_late(connection, part, size):
            return
        step = self._step
        if step is not None and step.is_down and step.is_open(connection):
            step.meter.on_part(size, now)
            step.missing -= size
            if part.is_last:
                step.ended.set_result(step.meter)
            return
        served = self._served
        if served is None or served.key != connection.key:
            connection.record_unwanted(size)
            return
        served.received += size
        if served.received > MAX_LINE_TEST_BYTES:
            raise MessageError("it sends more bytes than a test of the line has")
        served.meter.on_part(size, now)
        if part.is_last:
            measured = served.meter
            served.meter = StepMeter()
            seconds = min(3600.0, measured.seconds)
            connection.send_message(LineTestReceipt(size=measured.size, seconds=seconds))

    def _is_late(self, connection: Connection, part: LineTestPart, size: int) -> bool:
        """Count bytes of a download that took too long; return whether these are of one.

        A channel is in order: they arrive before those of any later step.
        """
        late = self._late
        if late is None or late.connection is not connection:
            return False
        late.missing -= size
        if part.is_last or late.missing <= 0:
            self._late = None
        return True


def _is_on_internet(connection: Connection) -> bool:
    """Return whether a peer is seen at a public address: only then is the line the internet's."""
    return is_public_host(host_of(connection.channel.remote_address))
