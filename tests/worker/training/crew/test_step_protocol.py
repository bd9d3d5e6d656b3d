"""What a machine of a crew does with a step on which its lead no longer decides."""

import asyncio

import pytest
from helpers.network.memory_transport import MemoryNetwork
from helpers.worker.crews import IDENTITIES, deal
from helpers.worker.plans import bitwise

from barnraise.protocol.messages import Peer
from barnraise.training.crew.crew_frames import pack_control, unpack
from barnraise.training.crew.crew_links import CrewLinks
from barnraise.training.crew.crew_messages import (
    CrewHello,
    LoadTask,
    Norms,
    Order,
    StepDecision,
)
from barnraise.training.crew.routing import StepRoutes
from barnraise.training.crew.step_protocol import MemberStep

ROSTER = deal(bitwise.resident_plan(bitwise.MODEL, 4), (2, 3, 3))
STEP = 7  # the number of its order
TIMEOUT = 60.0  # seconds that only a failure reaches


@pytest.fixture
async def computing():
    """Provide a machine that computes its part of a step, and its lead's channel."""
    network = MemoryNetwork()
    lead, member = (network.transport(IDENTITIES[n].key) for n in (0, 2))
    sources = [transport.add_protocol("crew") for transport in (lead, member)]
    for transport in (lead, member):
        await transport.start()
    links = CrewLinks(ROSTER, 2, asyncio.get_running_loop())
    channel = await sources[0].connect(Peer(key=member.key, addresses=[]))
    serving = asyncio.create_task(links.serve(await sources[1].accept()))
    assert isinstance(unpack(await channel.receive()), CrewHello)
    side = MemberStep(links, STEP, lambda: False, StepRoutes(ROSTER))
    yield side, channel
    serving.cancel()
    for transport in (lead, member):
        await transport.close()


def agree(side):
    norms = dict.fromkeys(ROSTER.stages[2].fragments, 1.0)
    return asyncio.create_task(asyncio.to_thread(side.agree, [], norms))


@pytest.fixture
async def prepared(computing):
    """Provide a machine that waits for the decision on its step, and its lead's channel."""
    side, channel = computing
    agreeing = agree(side)
    assert isinstance(unpack(await channel.receive()), Norms)
    return side, channel, agreeing


def later_order():
    return pack_control(Order(epoch=1, number=STEP + 1, task=LoadTask(label=1), attachments=[]))


async def test_step_ends_when_a_restarted_lead_gives_another_order(prepared):
    side, channel, agreeing = prepared
    await channel.send(later_order())
    assert await asyncio.wait_for(agreeing, TIMEOUT) is None
    assert side.is_cancelled and side.problem == "the lead has restarted since the step began"


async def test_decision_before_a_later_order_counts(prepared):
    _, channel, agreeing = prepared
    decision = StepDecision(epoch=1, number=STEP, verdict="apply", loss=0.5, norm=2.0)
    await channel.send(pack_control(decision))
    await channel.send(later_order())
    assert await asyncio.wait_for(agreeing, TIMEOUT) == (0.5, 2.0)


async def test_cancellation_that_arrives_while_a_machine_computes_counts(computing):
    side, channel = computing
    await channel.send(pack_control(StepDecision(epoch=1, number=STEP, verdict="cancel")))
    while not side.is_cancelled:
        await asyncio.sleep(0)
    assert await asyncio.wait_for(agree(side), TIMEOUT) is None
