"""Connections without a ledger: who is served, what ends a connection, and what does not."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from helpers.network.handshakes import MIRROR, MIRRORS, NOW, SPEC_DIGEST, create_handshake
from helpers.network.memory_transport import MemoryChannel, MemoryNetwork
from helpers.updates.tickets import sign_ticket

from barnraise.errors import FloodError, MessageError
from barnraise.peering.links.received import Received
from barnraise.peering.membership.link_actions import Dial
from barnraise.peering.membership.membership import Meeting, PartialView
from barnraise.peering.peer_server import PeeringConfig, PeeringUser, PeerServer, Task
from barnraise.peering.transports.framing import pack, unpack
from barnraise.peering.transports.transport import ChannelClosedError
from barnraise.protocol.messages import BlobPart, BlobRequest, Goodbye, Hello, Peer
from barnraise.protocol.signing import Identity
from barnraise.protocol.types import Message

ADA, BEN, CAT, DAN = (Identity(bytes([number]) * 32) for number in (1, 2, 3, 4))
AT_ADA = Peer(key=ADA.key, addresses=["memory:x"])
NOTHING = "0" * 64  # a digest that a `Machine` only records; the others are errors
ERRORS = {
    "1" * 64: MessageError("that is not allowed"),
    "2" * 64: FloodError("that is too much"),
    "3" * 64: ValueError("a mistake of ours"),
}


@dataclass
class Link:
    """What a machine without gossip records of a link."""

    key: str
    connected_at: float
    meeting: Meeting
    eager: bool = True
    leaving_since: float | None = None


class LinkRecorder:
    """Record what becomes of links, in place of gossip."""

    def __init__(self, key: str) -> None:
        self.membership = PartialView(key, 0)
        self.links: dict[str, Link] = {}
        self.events: list[tuple[str, str]] = []

    def on_connected(self, key, now, meeting) -> None:
        self.links[key] = Link(key, now, meeting)
        self.events.append(("connected", key))

    def on_message(self, key, now) -> None:
        assert key in self.links

    def on_goodbye(self, key, now) -> None:
        self.events.append(("goodbye", key))

    def on_left(self, key) -> None:
        self.events.append(("left", key))

    def on_disconnected(self, key, now) -> None:
        del self.links[key]
        self.events.append(("disconnected", key))


@dataclass
class Machine:
    """A peer server with a recorder in place of gossip, and no ledger."""

    network: MemoryNetwork
    identity: Identity
    excluded: set[str] = field(default_factory=set)
    received: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        async def store_peer(peer: Peer, volunteer: str) -> None:
            self.received.append(("met", peer.key))

        self.recorder = LinkRecorder(self.identity.key)
        ticket = sign_ticket(MIRROR, self.identity.key, issued=NOW)
        config = PeeringConfig(self.identity, MIRRORS, SPEC_DIGEST, ticket, lambda: NOW)
        user = PeeringUser(
            membership=self.recorder.membership,
            links=self.recorder.links,
            on_connected=self.recorder.on_connected,
            on_message=self.recorder.on_message,
            on_goodbye=self.recorder.on_goodbye,
            on_left=self.recorder.on_left,
            on_disconnected=self.recorder.on_disconnected,
            incarnation=lambda: "1" * 16,
            has_signed=lambda update: False,
            is_excluded=lambda key, volunteer: key in self.excluded,
            store_peer=store_peer,
            on_mirrors_changed=lambda mirrors: None,
            wake=lambda: None,
        )
        self.server = PeerServer(config, self.network.transport(self.identity.key), user)
        self.server.set_sources(
            compose_state=lambda key: None,
            open_update=lambda *update: iter(()),
            open_blob=lambda *blob: iter(()),
        )
        self.server.register({BlobRequest: self.on_request})

    def on_request(self, received: Received[BlobRequest]) -> None:
        digest = received.message.digest
        if digest in ERRORS:
            raise ERRORS[digest]
        self.received.append((digest, received.key))

    async def start(self, *essential: Task, **optional: Task) -> "Machine":
        ready = asyncio.Event()
        self.running = asyncio.create_task(self.server.run(ready.set, essential, optional))
        await ready.wait()
        return self

    async def stop(self) -> None:
        self.server.stop()
        await self.running


@pytest.fixture
async def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
async def ada(network) -> AsyncIterator[Machine]:
    machine = await Machine(network, ADA).start()
    yield machine
    await machine.stop()


async def connect(network: MemoryNetwork, identity: Identity, volunteer: str = "") -> MemoryChannel:
    """Connect to Ada as a peer that sends only what a test wants to send; return its channel."""
    transport = network.transport(identity.key)
    await transport.start()
    return await introduce(await transport.connect(AT_ADA), identity, volunteer)


async def introduce(
    channel: MemoryChannel, identity: Identity, volunteer: str = ""
) -> MemoryChannel:
    """Send a valid Hello of a peer over a new channel, and return the channel."""
    handshake = create_handshake(identity, volunteer=volunteer or identity.key)
    await channel.send(pack(handshake.build_hello(channel)))
    return channel


async def send_request(channel: MemoryChannel, digest: str = NOTHING) -> None:
    await channel.send(pack(BlobRequest(digest=digest)))


async def wait_until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def receive_until_closed(channel: MemoryChannel) -> tuple[list[Message], str]:
    """Return all messages until the channel ends, and the reason."""
    received: list[Message] = []
    async with asyncio.timeout(10):
        while True:
            try:
                received.append(unpack(await channel.receive())[0])
            except ChannelClosedError as error:
                return received, str(error)


async def test_second_handler_for_a_type_is_refused_by_name(network):
    machine = Machine(network, ADA)
    with pytest.raises(ValueError, match="BlobRequest: there is a handler already"):
        machine.server.register({BlobRequest: machine.on_request})
    with pytest.raises(ValueError, match="Goodbye, Hello"):
        machine.server.register({Hello: machine.on_request, Goodbye: machine.on_request})


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (pack(BlobRequest(digest="1" * 64)), "that is not allowed"),
        (pack(BlobRequest(digest=NOTHING)) + b"x", "blob_request carries 1 bytes of payload"),
        (b"garbage", "a frame"),
        (pack(BlobRequest(digest="3" * 64)), "an error on this side"),
        (pack(Goodbye(reason="I have enough links")), "closed"),
    ],
)
async def test_message_that_is_refused_ends_its_connection_alone(
    network, ada, caplog, frame, reason
):
    caplog.set_level(logging.INFO, "barnraise.exchange")
    channel, other = await connect(network, BEN), await connect(network, CAT)
    await wait_until(lambda: len(ada.recorder.links) == 2)
    await channel.send(frame)
    await send_request(channel)  # comes too late
    await wait_until(lambda: list(ada.server.connections) == [CAT.key])
    await send_request(other)
    await wait_until(lambda: (NOTHING, CAT.key) in ada.received)
    assert (NOTHING, BEN.key) not in ada.received
    assert ada.recorder.events[-1] == ("disconnected", BEN.key)
    assert f"{BEN.key[:8]}" in caplog.text
    if reason != "closed":
        assert reason in (await receive_until_closed(channel))[1]
    else:
        assert ("goodbye", BEN.key) in ada.recorder.events
    assert ("a mistake of ours" in caplog.text) == ("error on this side" in reason)


async def test_key_that_floods_may_not_come_back_soon(network, ada):
    flooding, other = await connect(network, BEN), await connect(network, CAT)
    await send_request(flooding, "2" * 64)
    assert "too much" in (await receive_until_closed(flooding))[1]
    again = await flooding.owner.connect(AT_ADA)
    assert "you flooded this machine" in (await receive_until_closed(again))[1]
    other.close("the power failed")
    await wait_until(lambda: not ada.server.connections)
    await introduce(await other.owner.connect(AT_ADA), CAT)
    await wait_until(lambda: list(ada.server.connections) == [CAT.key])


async def test_newer_connection_of_a_peer_replaces_the_older(network, ada):
    older = await connect(network, BEN)
    await wait_until(lambda: ada.server.connections)
    newer = await introduce(await older.owner.connect(AT_ADA), BEN)
    assert "a newer connection took its place" in (await receive_until_closed(older))[1]
    await send_request(newer)
    await wait_until(lambda: (NOTHING, BEN.key) in ada.received)
    assert ada.recorder.events == [("connected", BEN.key)] * 2, "the peer was never gone"
    assert ada.server.bytes_received == older.bytes_sent + newer.bytes_sent


async def test_third_machine_of_a_volunteer_is_not_linked(network, ada):
    for identity in (BEN, CAT):
        await connect(network, identity, volunteer="7" * 64)
    await wait_until(lambda: len(ada.server.connections) == 2)
    third = await connect(network, DAN, volunteer="7" * 64)
    assert "enough machines of your volunteer" in (await receive_until_closed(third))[1]
    assert list(ada.server.connections) == [BEN.key, CAT.key]


async def test_peer_without_a_hello_is_refused_and_recorded_nowhere(network, ada):
    transport = network.transport(BEN.key)
    await transport.start()
    channel = await transport.connect(AT_ADA)
    await channel.send(pack(BlobPart(digest=NOTHING, offset=0, total=1), b"x"))
    assert "before hello" in (await receive_until_closed(channel))[1]
    assert ada.recorder.events == [] and not ada.server.connections


async def test_servers_dial_and_greet_each_other_unless_one_is_excluded(network, ada):
    ben = await Machine(network, BEN).start()
    cat = await Machine(network, CAT, excluded={ADA.key}).start()
    for machine in (ben, cat):
        machine.server.perform(Dial(AT_ADA))
    await wait_until(lambda: ada.server.connections and ben.server.connections)
    ben.server.connections[ADA.key].send_message(BlobRequest(digest=NOTHING))
    await wait_until(lambda: (NOTHING, BEN.key) in ada.received)
    assert ("met", ADA.key) in ben.received and ("met", BEN.key) in ada.received
    assert ("connected", CAT.key) not in ada.recorder.events
    await cat.stop()
    await ben.stop()
    await wait_until(
        lambda: ada.recorder.events[-2:] == [("left", BEN.key), ("disconnected", BEN.key)]
    )


async def test_errors_of_tasks_are_logged_unless_a_channel_closed(network, ada, caplog):
    async def fail(error: Exception) -> None:
        raise error

    ada.server.spawn(fail(ChannelClosedError("it left")))
    ada.server.spawn(fail(ValueError("a slip")))
    await wait_until(lambda: "an error of ours in the exchange" in caplog.text)
    assert "a slip" in caplog.text and "it left" not in caplog.text
    assert not ada.running.done()


async def test_optional_part_that_fails_ends_nothing_an_essential_one_all(network, caplog):
    ending = asyncio.Event()

    async def fail() -> None:
        raise ValueError("a slip")

    async def end() -> None:
        await ending.wait()

    machine = await Machine(network, ADA).start(end, luxury=fail)
    await wait_until(lambda: "goes on without luxury" in caplog.text)
    channel = await connect(network, BEN)
    await wait_until(lambda: machine.server.connections)
    ending.set()
    await asyncio.wait_for(machine.running, 10)
    assert "leaving" in (await receive_until_closed(channel))[1]


async def test_stop_closes_every_connection_and_cancels_every_task(network, ada):
    channels = [await connect(network, identity) for identity in (BEN, CAT)]
    await wait_until(lambda: len(ada.server.connections) == 2)
    forever = ada.server.spawn(asyncio.sleep(3600))
    await asyncio.wait_for(ada.stop(), 10)
    assert forever.cancelled()
    for channel in channels:
        with pytest.raises(ChannelClosedError) as closed:
            while True:
                await channel.receive()
        assert closed.value.peer_left
    with pytest.raises(ChannelClosedError):
        await channels[0].owner.connect(AT_ADA)
