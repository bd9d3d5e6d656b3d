"""A machine that asks the lead of a crew that trains for a seat gets an answer."""

import asyncio
import contextlib

from helpers.network.memory_transport import MemoryNetwork
from helpers.worker.crew_doors import dial_lead, open_door, send_application
from helpers.worker.crews import IDENTITIES, RUN, deal
from helpers.worker.plans import bitwise

from barnraise.peering.transports.transport import ChannelClosedError
from barnraise.training.crew.crew_channels import CrewChannels
from barnraise.training.crew.crew_code import CrewCode
from barnraise.training.crew.crew_links import CrewLinks

ROSTER = deal(bitwise.resident_plan(bitwise.MODEL, 4), (4, 4))
LEAD, STRANGER = IDENTITIES[0], IDENTITIES[4]
DEALS = 40
TIMEOUT = 60.0  # seconds that only a failure reaches


async def test_machine_that_asks_when_a_deal_ends_asks_the_next_one(tmp_path):
    """However far the lead has come with its channel, one turn of the event loop after another."""
    network = MemoryNetwork()
    door, stranger = await open_door(network, LEAD), await open_door(network, STRANGER)
    code = CrewCode.create(RUN, LEAD.key, [])
    answers: list[str] = []

    async def apply_repeatedly() -> None:
        while True:
            try:
                channel = await dial_lead(stranger, LEAD.key)
                await send_application(channel, code, STRANGER, "ada")
                await channel.receive()
            except ChannelClosedError as error:
                answers.append(str(error))

    applying = asyncio.create_task(apply_repeatedly())
    for turns in range(DEALS):
        links = CrewLinks(ROSTER, 0, asyncio.get_running_loop())
        channels = CrewChannels(links, door, ROSTER.seating, code, tmp_path)
        serving = asyncio.create_task(channels.run())
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(TIMEOUT):
            while turns == DEALS - 1 and not channels.list_applicants():
                await asyncio.sleep(0.01)
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    applying.cancel()
    assert "closed by peer: the crew's channels are closed" in answers
    assert "closed by peer: the crew trains: there is a seat at the end of a round" in answers
