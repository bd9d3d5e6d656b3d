"""What ends a crew's channel: frames that the roster does not imply, and strangers."""

import asyncio

import pytest
from helpers.network.memory_transport import MemoryNetwork
from helpers.worker.crews import IDENTITIES, deal
from helpers.worker.plans import bitwise

from barnraise.errors import MessageError
from barnraise.peering.transports.transport import ChannelClosedError
from barnraise.protocol.messages import Peer
from barnraise.training.crew import crew_links
from barnraise.training.crew.crew_frames import (
    CrewPiece,
    PayloadId,
    PieceKind,
    pack_control,
    unpack,
)
from barnraise.training.crew.crew_links import CrewLinks
from barnraise.training.crew.crew_messages import CrewHello, Norms, Ping, StepDecision

ROSTER = deal(bitwise.resident_plan(bitwise.MODEL, 4), (2, 3, 3))
LAST = bitwise.MODEL.layers + 1
SIZE = ROSTER.boundary_bytes(2)
TIMEOUT = 60.0  # seconds that only a failure reaches


@pytest.fixture
async def line():
    """Provide the lead's links, and the last machine's end of their channel."""
    network = MemoryNetwork()
    lead, member, stranger = (network.transport(IDENTITIES[n].key) for n in (0, 2, 4))
    sources = [transport.add_protocol("crew") for transport in (lead, member, stranger)]
    for transport in (lead, member, stranger):
        await transport.start()
    links = CrewLinks(ROSTER, 0, asyncio.get_running_loop())
    channel = await sources[1].connect(Peer(key=lead.key, addresses=[]))
    serving = asyncio.create_task(links.serve(await sources[0].accept()))
    assert isinstance(unpack(await channel.receive()), CrewHello)
    yield links, channel, serving, sources
    serving.cancel()
    for transport in (lead, member, stranger):
        await transport.close()


def boundary(data, epoch=1, key=LAST, part=0, total=SIZE):
    """Return a frame of activations of the last block, as far as nothing else is said."""
    of = PayloadId(PieceKind.BOUNDARY, 1, part, key)
    return CrewPiece(epoch, of, total, 0, data).pack()


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (boundary(b"x", total=SIZE + 4), "does not imply"),
        (boundary(b"x", key=4), "does not imply"),
        (boundary(b"x", key=-3), "does not imply"),
        (boundary(b"x", part=4), "does not imply"),
        (boundary(b"x", epoch=2), "another roster"),
        (pack_control(Norms(epoch=0, number=1, norms=[])), "another roster"),
        (b"\x07" + bytes(100), "does not exist"),
        (b"", "empty"),
        (b"\x00[]", "malformed"),
    ],
)
async def test_frame_that_no_member_writes_ends_the_channel(line, frame, reason):
    links, channel, serving, _ = line
    await channel.send(frame)
    await asyncio.wait_for(serving, TIMEOUT)
    assert links.connected() == set() and reason in links.reason(2)
    with pytest.raises(ChannelClosedError, match=reason):
        while True:
            await channel.receive()


async def test_activations_and_gradients_of_the_neighbours_arrive(line):
    links, channel, _, _ = line
    links.start_order(1)
    await channel.send(boundary(bytes(SIZE)))
    of = PayloadId(PieceKind.BOUNDARY, 1, 0, LAST)
    while not links.has_payload(2, of):
        await asyncio.sleep(0)
    assert links.pop_payload(2, of) == bytes(SIZE) and links.bytes_received == SIZE


async def test_machine_without_a_place_is_refused(line):
    links, _, _, sources = line
    await sources[2].connect(Peer(key=IDENTITIES[0].key, addresses=[]))
    with pytest.raises(MessageError, match="no place next to this machine"):
        await links.serve(await sources[0].accept())


async def test_silent_machine_counts_as_gone(line, monkeypatch):
    links, _, _, sources = line
    monkeypatch.setattr(crew_links, "SILENCE_SECONDS", 0.05)
    second = await sources[1].connect(Peer(key=IDENTITIES[0].key, addresses=[]))
    await asyncio.wait_for(links.serve(await sources[0].accept()), TIMEOUT)
    assert links.reason(2).startswith("nothing came from it")
    second.close("done")


async def test_new_channel_begins_with_the_last_decision(line):
    links, channel, serving, sources = line
    decision = StepDecision(epoch=1, number=3, verdict="apply", loss=0.1, norm=1 / 3)
    links.send_decision(decision, [2])
    links.send_decision(decision.model_copy(update={"number": 4}), [1])
    assert unpack(await channel.receive()) == decision
    channel.close("the line is cut")
    await asyncio.wait_for(serving, TIMEOUT)
    second = await sources[1].connect(Peer(key=IDENTITIES[0].key, addresses=[]))
    again = asyncio.create_task(links.serve(await sources[0].accept()))
    assert isinstance(unpack(await second.receive()), CrewHello)
    assert unpack(await second.receive()) == decision
    again.cancel()


async def test_machine_with_another_session_has_restarted(line):
    links, channel, _, _ = line
    for session, restarted in (("a" * 16, None), ("a" * 16, None), ("b" * 16, 2)):
        await channel.send(pack_control(CrewHello(epoch=1, session=session)))
        await channel.send(pack_control(Norms(epoch=1, number=1, norms=[])))
        while links.pop_message(2) is None:
            await asyncio.sleep(0)
        assert links.find_restarted() == restarted
    links.accept_restarts()
    assert links.find_restarted() is None


async def test_channel_without_work_carries_signs_of_life(line, monkeypatch):
    _, channel, _, _ = line
    monkeypatch.setattr(crew_links, "PING_SECONDS", 0.01)
    await channel.send(pack_control(Ping()))
    frame = await asyncio.wait_for(channel.receive(), TIMEOUT)
    assert isinstance(unpack(frame), Ping)
