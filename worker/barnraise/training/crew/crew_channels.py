"""Keep a crew's channels open: dial the neighbours, and dial again whatever breaks."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from barnraise.durable_io import write_atomically
from barnraise.errors import MessageError
from barnraise.peering.transports.transport import Channel, ChannelClosedError
from barnraise.protocol.messages import Peer
from barnraise.training.crew.crew_endpoint import CrewDoor
from barnraise.training.crew.crew_links import CrewLinks
from barnraise.training.crew.crew_status import STATUS_FILE, CrewStatus, SeatStatus

log = logging.getLogger("barnraise")

REDIAL_SECONDS = 1.0  # between two dials of a neighbour that does not answer
STATUS_SECONDS = 2.0  # between two writings of the status


class CrewChannels:
    """Serve the channels between this machine and its neighbours in the crew."""

    def __init__(
        self,
        links: CrewLinks,
        door: CrewDoor,
        addresses: Mapping[str, Sequence[str]],
        folder: Path,
        run: str,
    ) -> None:
        """Serve `links` with channels of `door`.

        Args:
            links: what travels over the channels.
            door: opens them.
            addresses: of the crew's machines, by key.
            folder: of the run, for the status.
            run: the run's id.
        """
        self._links, self._door, self._addresses = links, door, addresses
        self._folder, self._run = folder, run

    async def run(self) -> None:
        """Accept, dial and write the status, until cancelled."""
        roster, number = self._links.roster, self._links.number
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._accept(tasks))
            tasks.create_task(self._write_status())
            for neighbour in roster.neighbours(number):
                if neighbour < number:  # the machine with the greater number dials
                    tasks.create_task(self._dial(roster.seats[neighbour].key))

    async def _accept(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            tasks.create_task(self._admit(await self._door.accept()))

    async def _admit(self, channel: Channel) -> None:
        try:
            await self._door.admit(channel)
            await self._links.serve(channel)
        except (MessageError, ChannelClosedError, TimeoutError) as error:
            reason = str(error) or "it did not introduce itself in time"
            log.info("no channel of the crew for %s: %s", channel.peer[:8], reason)
            channel.close(reason)

    async def _dial(self, key: str) -> None:
        peer = Peer(key=key, addresses=list(self._addresses[key]))
        while True:
            with contextlib.suppress(MessageError, ChannelClosedError, TimeoutError):
                await self._links.serve(await self._door.dial(peer))
            await asyncio.sleep(REDIAL_SECONDS)

    async def _write_status(self) -> None:
        while True:
            status = self._describe()
            await asyncio.to_thread(
                write_atomically, self._folder / STATUS_FILE, status.model_dump_json().encode()
            )
            await asyncio.sleep(STATUS_SECONDS)

    def _describe(self) -> CrewStatus:
        links, roster = self._links, self._links.roster
        connected = {links.number, *links.connected()}
        seats: list[SeatStatus] = []
        for number, seat in enumerate(roster.seats):
            blocks = [i for i in seat.stage.fragments if 0 < i <= roster.model.layers]
            seats.append(
                SeatStatus(
                    name=roster.name_of(number),
                    first_block=blocks[0],
                    blocks=len(blocks),
                    connected=number in connected,
                )
            )
        return CrewStatus(
            run=self._run,
            number=links.number,
            boundary_bits=roster.seats[links.number].boundary_bits,
            bytes_sent=links.bytes_sent,
            bytes_received=links.bytes_received,
            seats=seats,
            at=time.time(),
        )
