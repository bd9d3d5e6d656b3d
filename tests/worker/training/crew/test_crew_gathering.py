"""A lead begins with the machines that have come, and answers those that come too late."""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from helpers.network.memory_transport import MemoryNetwork
from helpers.worker.crew_doors import dial_lead, open_door, send_application
from helpers.worker.crews import IDENTITIES, RUN
from helpers.worker.plans import bitwise

from barnraise.peering.transports.transport import Channel, ChannelClosedError
from barnraise.planning.crew import CrewMachine, CrewTask, SpanPrice, SpanRequest
from barnraise.protocol.signing import Identity
from barnraise.training.crew import crew_gathering
from barnraise.training.crew.crew_code import CrewCode
from barnraise.training.crew.crew_frames import pack_control, unpack
from barnraise.training.crew.crew_gathering import LAN_LINE, CrewGathering
from barnraise.training.crew.forming_messages import PriceList, PriceQuery, Seating, ShapePrices

LEAD, ADA, BEN, ABSENT = IDENTITIES[:4]
CODE = CrewCode.create(RUN, LEAD.key, [])
ROOM = bitwise.MODEL.layers - 1  # blocks that each machine can hold
TIMEOUT = 60.0  # seconds that only a failure reaches
LONG = 1e6  # seconds that pass only for a test's clock


def price(span: SpanRequest) -> SpanPrice | None:
    """Return what a span costs each of these machines."""
    return SpanPrice(float(span.blocks)) if span.blocks <= ROOM else None


@dataclass
class Applicant:
    """A machine that has applied to the lead, and is to price its spans."""

    name: str
    channel: Channel
    query: PriceQuery
    caplog: pytest.LogCaptureFixture

    async def send_prices(self) -> None:
        """Answer what to price; wait until the lead has the answer."""
        prices = [SpanPrice(float(blocks)) for blocks in range(1, ROOM + 1)]
        shapes = [ShapePrices(sequences=each, prices=prices) for each in self.query.sequences]
        await self.channel.send(pack_control(PriceList(can_lead=True, shapes=shapes)))
        while f"{self.name} joined the crew" not in self.caplog.text:
            await asyncio.sleep(0.01)

    async def receive_seats(self) -> set[str]:
        """Return the names of the machines with a seat."""
        seating = unpack(await asyncio.wait_for(self.channel.receive(), TIMEOUT))
        assert isinstance(seating, Seating)
        self.channel.close("seated")
        return {seat.name for seat in seating.seats}


@pytest.fixture
def pass_time(monkeypatch):
    """Provide a function that lets a long time pass for the lead."""
    passed = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + passed[0], sleep=time.sleep, time=time.time
    )
    monkeypatch.setattr(crew_gathering, "time", clock)

    def pass_time():
        passed[0] += 2 * LONG

    return pass_time


@pytest.fixture
async def lead(caplog):
    """Provide functions that start to gather a crew, and let a machine apply to it."""
    caplog.set_level("INFO")
    network, stopping = MemoryNetwork(), threading.Event()
    door = await open_door(network, LEAD)
    gatherings: list[asyncio.Future] = []

    def gather(wanted: int | None = None, expected: Sequence[Identity] = ()) -> None:
        machine, task = CrewMachine("the lead", LAN_LINE, price), CrewTask(bitwise.MODEL, 4)
        gathering = CrewGathering(door, CODE, machine, task, [each.key for each in expected])
        work = asyncio.to_thread(gathering.gather, wanted, stopping.is_set, LONG)
        gatherings.append(asyncio.ensure_future(work))

    async def start_applicant(identity: Identity, name: str) -> Applicant:
        channel = await dial_lead(await open_door(network, identity), LEAD.key)
        await send_application(channel, CODE, identity, name)
        query = unpack(await asyncio.wait_for(channel.receive(), TIMEOUT))
        assert isinstance(query, PriceQuery)
        return Applicant(name, channel, query, caplog)

    yield SimpleNamespace(gather=gather, start_applicant=start_applicant)
    stopping.set()
    await asyncio.gather(*gatherings)


async def test_crew_does_not_wait_for_an_expected_machine_for_ever(lead, pass_time):
    lead.gather(expected=[ADA, ABSENT])
    ada = await lead.start_applicant(ADA, "ada")
    await ada.send_prices()
    pass_time()
    assert await ada.receive_seats() == {"the lead", "ada"}


async def test_crew_of_no_fixed_size_begins_once_nobody_comes(lead, monkeypatch):
    monkeypatch.setattr(crew_gathering, "QUIET_SECONDS", 0.1)
    lead.gather()
    ada = await lead.start_applicant(ADA, "ada")
    await ada.send_prices()
    assert await ada.receive_seats() == {"the lead", "ada"}


async def test_machine_that_prices_its_spans_is_waited_for(lead, pass_time):
    lead.gather(expected=[ABSENT])
    ada, ben = await lead.start_applicant(ADA, "ada"), await lead.start_applicant(BEN, "ben")
    await ada.send_prices()
    pass_time()
    await asyncio.sleep(3 * crew_gathering.POLL_SECONDS)
    await ben.send_prices()
    everybody = {"the lead", "ada", "ben"}
    assert await ada.receive_seats() == await ben.receive_seats() == everybody


async def test_machine_that_comes_while_the_crew_is_planned_asks_again(lead, monkeypatch):
    plan_crew, planning, has_come = crew_gathering.plan_crew, threading.Event(), threading.Event()

    def plan_slowly(machines, task):
        planning.set()
        assert has_come.wait(TIMEOUT)
        return plan_crew(machines, task)

    monkeypatch.setattr(crew_gathering, "plan_crew", plan_slowly)
    lead.gather(wanted=1)
    ben = await lead.start_applicant(BEN, "ben")
    await ben.send_prices()
    assert await asyncio.to_thread(planning.wait, TIMEOUT)
    ada = await lead.start_applicant(ADA, "ada")
    await ada.send_prices()
    has_come.set()
    assert await ben.receive_seats() == {"the lead", "ben"}
    with pytest.raises(ChannelClosedError, match="the crew has begun without this machine"):
        await ada.receive_seats()
