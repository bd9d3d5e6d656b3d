"""Keep a crew's channels open: dial the neighbours, and dial again whatever breaks."""

import asyncio
import contextlib
import logging
import time
from functools import partial
from pathlib import Path

from barnraise.durable_io import write_atomically
from barnraise.errors import MessageError
from barnraise.peering.transports.transport import Channel, ChannelClosedError
from barnraise.protocol.messages import Peer
from barnraise.training.crew.crew_code import CrewCode
from barnraise.training.crew.crew_endpoint import CrewDoor, send_farewell
from barnraise.training.crew.crew_frames import unpack
from barnraise.training.crew.crew_links import LEFT_OUT, SILENCE_SECONDS, CrewLinks
from barnraise.training.crew.crew_messages import CrewHello, Recall
from barnraise.training.crew.crew_status import STATUS_FILE, CrewStatus, SeatStatus, describe_seats
from barnraise.training.crew.forming_messages import (
    CrewApplication,
    CrewRefusal,
    Seating,
)
from barnraise.training.crew.roster import LEAD

log = logging.getLogger("barnraise")

REDIAL_SECONDS = 1.0  # between two dials of a neighbour that does not answer
LATE_SECONDS = 5.0  # after which the neighbour dials that should be dialled
APPLICANT_SECONDS = 15.0  # since a machine without a seat has applied last
STATUS_SECONDS = 2.0  # between two writings of the status


class CrewChannels:
    """Serve the channels between this machine and its neighbours in the crew."""

    def __init__(
        self,
        links: CrewLinks,
        door: CrewDoor,
        seating: Seating,
        code: CrewCode,
        folder: Path,
    ) -> None:
        """Serve `links` with channels of `door`.

        Args:
            links: what travels over the channels.
            door: opens them.
            seating: the crew's machines and their addresses.
            code: of the crew.
            folder: of the run, for the status.
        """
        self._links, self._door, self._seating = links, door, seating
        self._code, self._folder = code, folder
        self._applied_at: dict[str, float] = {}  # monotonic, by the keys of machines without a seat

    def list_applicants(self) -> set[str]:
        """Return the keys of machines that wait for a seat in this crew."""
        now = time.monotonic()
        applied = list(self._applied_at.items())
        return {key for key, at in applied if now - at < APPLICANT_SECONDS}

    async def run(self) -> None:
        """Accept, dial and write the status, until cancelled."""
        number = self._links.number
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._accept(tasks))
            tasks.create_task(self._write_status())
            for neighbour in self._links.roster.neighbours(number):
                tasks.create_task(self._dial(neighbour))

    async def _accept(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            channel = await self._door.accept()
            admission = tasks.create_task(self._admit(channel))
            admission.add_done_callback(partial(_end_admission, channel))

    async def _admit(self, channel: Channel) -> None:
        try:
            addresses = await self._door.admit(channel)
            first = await asyncio.wait_for(channel.receive(), SILENCE_SECONDS)
            message = unpack(first)
            if isinstance(message, CrewApplication):
                await self._seat_again(channel, message, addresses)
            else:
                await self._serve(channel, first)
        except (MessageError, ChannelClosedError, TimeoutError) as error:
            reason = str(error) or "it did not introduce itself in time"
            log.info("no channel of the crew for %s: %s", channel.peer[:8], reason)
            channel.close(reason)

    async def _serve(self, channel: Channel, first: bytes) -> None:
        """Serve a channel of this deal; a machine of an earlier one applies for a seat again."""
        hello, links = unpack(first), self._links
        has_seat = links.roster.find_seat(channel.peer) not in links.dropped
        if isinstance(hello, CrewHello) and hello.epoch == links.roster.epoch and has_seat:
            await links.serve(channel, first)
        elif links.number == LEAD:
            await send_farewell(channel, Recall())
        else:
            raise MessageError("it has another deal of the blocks")

    async def _seat_again(
        self, channel: Channel, application: CrewApplication, addresses: list[str]
    ) -> None:
        """Send the seats to a machine of this crew that has restarted, and applies once more.

        One without a seat gets it when the blocks are dealt again, at the end of a round.

        Raises:
            MessageError: this machine is not the lead, or there is no seat now.
        """
        if self._links.number != LEAD:
            raise MessageError("it sent what belongs to the forming of a crew")
        problem = application.find_problem(channel.peer, self._code)
        if self._links.is_left_out(channel.peer):
            problem = f"it is left out: {LEFT_OUT}"
        if problem:
            await send_farewell(channel, CrewRefusal(reason=problem))
            return
        number = self._links.roster.find_seat(channel.peer)
        if number is None or number in self._links.dropped:
            self._applied_at[channel.peer] = time.monotonic()
            raise MessageError("the crew trains: there is a seat at the end of a round")
        log.info("%s is back in the crew", self._links.roster.name_of(number))
        seats = self._seating.seats
        seats[number] = seats[number].model_copy(update={"addresses": addresses})
        await send_farewell(channel, self._seating)

    async def _dial(self, neighbour: int) -> None:
        """Dial a neighbour again and again.

        The machine with the greater number dials. The other one does so later, because a machine
        that has restarted may have other addresses, which it alone knows.
        """
        pause = REDIAL_SECONDS if neighbour < self._links.number else LATE_SECONDS
        if neighbour > self._links.number:
            await asyncio.sleep(pause)
        while True:
            seat = self._seating.seats[neighbour]
            peer = Peer(key=seat.key, addresses=list(seat.addresses))
            if neighbour not in self._links.connected() | self._links.dropped:
                with contextlib.suppress(MessageError, ChannelClosedError, TimeoutError):
                    await self._links.serve(await self._door.dial(peer))
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # A channel that ended in the same moment has hidden the cancellation.
                raise asyncio.CancelledError
            await asyncio.sleep(pause)

    async def _write_status(self) -> None:
        while True:
            status = self._describe()
            try:
                await asyncio.to_thread(
                    write_atomically, self._folder / STATUS_FILE, status.model_dump_json().encode()
                )
            except OSError as error:
                # The channels do without it; the last deal's thread may be writing the same file.
                log.debug("the crew's status was not written: %s", error)
            await asyncio.sleep(STATUS_SECONDS)

    def _describe(self) -> CrewStatus:
        links, roster = self._links, self._links.roster
        views = describe_seats(roster, {links.number, *links.connected()})
        return CrewStatus(
            run=self._code.run,
            number=links.number,
            boundary_bits=roster.seating.boundary_bits,
            bytes_sent=links.bytes_sent,
            bytes_received=links.bytes_received,
            seats=[
                SeatStatus(name=roster.name_of(number), **view.model_dump())
                for number, view in enumerate(views)
            ],
            at=time.time(),
        )


def _end_admission(channel: Channel, admission: asyncio.Task[None]) -> None:
    """Close a channel whose admission was cancelled: the other machine would wait for an answer."""
    channel.close("the crew's channels are closed")
