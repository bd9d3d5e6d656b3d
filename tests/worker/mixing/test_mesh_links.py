"""Test what links do with frames that a neighbour writes as it likes, and when they redial."""

import asyncio
from types import SimpleNamespace

import pytest
from helpers.network.memory_transport import SEND_WINDOW, MemoryChannel, MemoryNetwork
from helpers.network.mixing_links import ThreadedLinks
from helpers.wait_for import wait_until

from barnraise.mixing import mesh_links
from barnraise.mixing.mesh_links import MESH_POLL_SECONDS
from barnraise.mixing.step_inbox import PIECE_BYTES, FrameKind, MixingFrame, roster_digest
from barnraise.peering.limits.rate_limit import FairShare
from barnraise.peering.limits.service_limits import SERVICE_LIMITS, Rate, Service
from barnraise.protocol.messages import Peer
from barnraise.protocol.signing import Identity

# The machine under test has the smaller key, so that the neighbour dials it.
KEY, NEIGHBOUR = sorted(Identity(bytes([n]) * 32).key for n in (1, 2))
ROSTER = roster_digest([KEY, NEIGHBOUR])
STATE = bytes(range(256)) * (2 * SEND_WINDOW // 256)  # more than a channel buffers
REQUESTS = 20
TIMEOUT = 120.0  # seconds that only a failure reaches


@pytest.fixture
def uplink() -> FairShare:
    """Provide the uplink of the machine under test: without a limit."""
    return FairShare()


@pytest.fixture
def limited(uplink) -> None:
    """Limit that uplink, to more than the test sends."""
    uplink.limit(1e9)


@pytest.fixture
async def pair(uplink):
    """Provide a machine's links, and the neighbour's end of one of them."""
    network = MemoryNetwork()
    members = [Peer(key=key, addresses=[]) for key in (KEY, NEIGHBOUR)]
    links = ThreadedLinks(network.transport(KEY), members, 8, len(STATE), uplink)
    links.start()
    transport = network.transport(NEIGHBOUR)
    channels = transport.add_protocol("mixing")
    await transport.start()
    channel = await channels.connect(members[0])
    await wait_for(lambda: links.neighbours() == [NEIGHBOUR])
    yield links, channel
    await asyncio.to_thread(links.stop)
    await transport.close()


async def wait_for(condition) -> None:
    await asyncio.to_thread(wait_until, condition)


async def receive_until(channel: MemoryChannel, kind: FrameKind) -> list[MixingFrame]:
    """Return the frames up to the first of a kind, this one included."""
    frames = [MixingFrame.unpack(await channel.receive())]
    while frames[-1].kind is not kind:
        frames.append(MixingFrame.unpack(await channel.receive()))
    return frames


def pieces(step: int) -> list[bytes]:
    """Return the frames of an answer with the weights of a step."""
    return [
        MixingFrame(
            FrameKind.STATE, step, ROSTER, len(STATE), begin, STATE[begin : begin + PIECE_BYTES]
        ).pack()
        for begin in range(0, len(STATE), PIECE_BYTES)
    ]


async def test_many_requests_for_weights_queue_one_answer(pair):
    links, channel = pair
    links.offer_state(3, STATE)
    request = MixingFrame(FrameKind.STATE_REQUEST, 0, ROSTER, 1, 0, b"?").pack()
    for _ in range(REQUESTS):
        await channel.send(request)
    await wait_for(lambda: links.bytes_received == REQUESTS)
    links.send_step(4, ROSTER, b"", lambda _: ())
    *answer, _ = await receive_until(channel, FrameKind.BEACON)
    assert b"".join(frame.data for frame in answer) == STATE, "one answer, and a whole one"
    await channel.send(request)
    (first,) = await receive_until(channel, FrameKind.STATE)
    assert first.offset == 0, "a later request has an answer again"


async def test_slow_weights_arrive_after_the_rest_of_an_earlier_answer(pair, monkeypatch):
    links, channel = pair
    now = [0.0]
    monkeypatch.setattr(mesh_links, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(mesh_links, "MIN_STATE_BYTES_PER_SECOND", 1.0)
    fetching = asyncio.create_task(asyncio.to_thread(links.fetch_state, NEIGHBOUR, 60.0))
    await receive_until(channel, FrameKind.STATE_REQUEST)
    await channel.send(pieces(step=2)[-1])  # of an answer on which this machine has given up
    first, *rest = pieces(step=7)
    await channel.send(first)
    await wait_for(lambda: links.bytes_received >= 2 * PIECE_BYTES)
    now[0] += 1000.0  # seconds: more than the limit, and less than the first piece may have lasted
    await asyncio.sleep(3 * MESH_POLL_SECONDS)
    for piece in rest:
        await channel.send(piece)
    assert await fetching == (7, STATE)
    assert links.neighbours() == [NEIGHBOUR]


async def test_weights_that_stop_arriving_are_not_awaited_for_ever(pair, monkeypatch):
    links, channel = pair
    now = [0.0]
    monkeypatch.setattr(mesh_links, "time", SimpleNamespace(monotonic=lambda: now[0]))
    fetching = asyncio.create_task(asyncio.to_thread(links.fetch_state, NEIGHBOUR, 60.0))
    await receive_until(channel, FrameKind.STATE_REQUEST)
    await channel.send(pieces(step=7)[0])
    await wait_for(lambda: links.bytes_received == PIECE_BYTES)
    now[0] += 1000.0
    assert await fetching is None


async def test_request_for_weights_is_repeated_over_a_newer_channel(pair):
    links, channel = pair
    fetching = asyncio.create_task(asyncio.to_thread(links.fetch_state, NEIGHBOUR, TIMEOUT))
    await receive_until(channel, FrameKind.STATE_REQUEST)
    # Both machines have dialled: the newer channel replaces the one that took the request.
    newer = await channel.owner.connect_for("mixing", Peer(key=KEY, addresses=[]))
    await receive_until(newer, FrameKind.STATE_REQUEST)
    for piece in pieces(step=7):
        await newer.send(piece)
    assert await fetching == (7, STATE)


async def test_leaving_ends_the_wait_for_weights(pair):
    links, _ = pair
    assert await asyncio.to_thread(links.fetch_state, NEIGHBOUR, 1e9, lambda: True) is None


async def test_neighbour_that_reads_nothing_costs_a_few_frames(pair):
    """A neighbour keeps its channel open and reads none of the steps' beacons and weights."""
    links, channel = pair
    await channel.send(MixingFrame(FrameKind.STATE_REQUEST, 0, ROSTER).pack())
    links.offer_state(1, STATE)
    for step in range(2000):
        links.send_step(step, ROSTER, bytes(8), lambda _: (NEIGHBOUR,))
    await channel.send(MixingFrame(FrameKind.STATE_REQUEST, 0, ROSTER, 1, 0, b"?").pack())
    await wait_for(lambda: links.bytes_received == 1)
    links.send_step(2000, ROSTER, b"", lambda _: ())
    frames = [MixingFrame.unpack(await channel.receive())]
    while (frames[-1].kind, frames[-1].step) != (FrameKind.BEACON, 2000):
        frames.append(MixingFrame.unpack(await channel.receive()))
    assert len(frames) < 2000, "it still learns where the others are"


async def test_limited_line_sends_weights_to_who_has_reached_the_step(limited, pair):
    links, channel = pair
    links.offer_state(5, STATE)
    links.send_step(5, ROSTER, b"weights!", lambda _: (NEIGHBOUR,))
    await receive_until(channel, FrameKind.BEACON)
    await channel.send(MixingFrame(FrameKind.BEACON, 4, ROSTER).pack())
    await channel.send(MixingFrame(FrameKind.STATE_REQUEST, 0, ROSTER).pack())
    answer = [MixingFrame.unpack(await channel.receive()) for _ in pieces(step=5)]
    assert {frame.kind for frame in answer} == {FrameKind.STATE}, "it was a step behind"
    await channel.send(MixingFrame(FrameKind.BEACON, 5, ROSTER).pack())
    (weights,) = await receive_until(channel, FrameKind.WEIGHTS)
    assert (weights.step, bytes(weights.data)) == (5, b"weights!")


async def test_line_without_a_limit_sends_weights_at_once(pair):
    links, channel = pair
    links.send_step(5, ROSTER, b"weights!", lambda _: (NEIGHBOUR,))
    *_, weights = await receive_until(channel, FrameKind.WEIGHTS)
    assert bytes(weights.data) == b"weights!"


async def test_neighbour_that_is_there_first_gets_the_weights_at_once(limited, pair):
    links, channel = pair
    await channel.send(MixingFrame(FrameKind.BEACON, 5, ROSTER).pack())
    await wait_for(lambda: links.newest_step() == 5)
    links.send_step(5, ROSTER, b"weights!", lambda _: (NEIGHBOUR,))
    *_, weights = await receive_until(channel, FrameKind.WEIGHTS)
    assert bytes(weights.data) == b"weights!"


async def test_neighbour_beyond_the_step_gets_no_weights_of_it(pair):
    links, channel = pair
    await channel.send(MixingFrame(FrameKind.BEACON, 9, ROSTER).pack())
    await wait_for(lambda: links.newest_step() == 9)
    links.send_step(5, ROSTER, b"weights!", lambda _: (NEIGHBOUR,))
    await receive_until(channel, FrameKind.BEACON)
    links.send_step(9, ROSTER, b"weights!", lambda _: (NEIGHBOUR,))
    frames = await receive_until(channel, FrameKind.WEIGHTS)
    kinds = [(frame.kind, frame.step) for frame in frames]
    assert kinds == [(FrameKind.BEACON, 9), (FrameKind.WEIGHTS, 9)]


@pytest.fixture
def few_frames(monkeypatch):
    """Let a neighbour send ten small frames, and then hardly any."""
    few = {"peer": Rate(0.001, 10.0)}
    monkeypatch.setitem(SERVICE_LIMITS, Service.SMALL_MIXING_FRAMES, few)


async def test_flood_of_beacons_is_read_at_a_bounded_rate(few_frames, pair):
    """A neighbour sends beacons as fast as its line allows."""
    links, channel = pair
    for step in range(100):
        await channel.send(MixingFrame(FrameKind.BEACON, step, ROSTER).pack())
    await wait_for(lambda: links.newest_step() >= 9)
    await asyncio.sleep(0.2)
    assert links.newest_step() < 15
