"""Connect to an exchange as a peer that sends exactly what a test wants to send."""

import asyncio
import logging
import threading
from contextlib import contextmanager

import pytest
from helpers.wait_for import wait_until

from barnraise.peering.limits.service_limits import SERVICE_LIMITS, Rate, Service
from barnraise.peering.transports.framing import pack
from barnraise.peering.transports.transport import ChannelClosedError
from barnraise.protocol import messages
from barnraise.protocol.signing import Identity, digest
from barnraise.protocol.versions import SPOKEN_PROTOCOLS


@contextmanager
def connect_raw_peer(world, machine, number=9, hello=None, reads=True, channels=None):
    """Connect to `machine` and yield a function that sends a message (and payload), or a frame.

    Args:
        world: The test's world.
        machine: The machine to connect to.
        number: Chooses the raw peer's key.
        hello: Its first message; None for a valid one.
        reads: Whether it reads the messages that it receives.
        channels: A list that its channel is appended to, with a function that runs a coroutine on
            its event loop.
    """
    identity = Identity(bytes([number]) * 32)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(20)

    transport = world.network.transport(identity.key)
    run(transport.start())
    channel = run(
        transport.connect(messages.Peer(key=machine.identity.key, addresses=["memory:x"]))
    )
    reader = None
    if channels is not None:
        channels.append((channel, run))

    async def discard_messages():
        while True:
            await channel.receive()

    def send(message, payload=b""):
        frame = message if isinstance(message, bytes) else pack(message, payload)
        run(channel.send(frame))

    try:
        run(channel.send(pack(hello or build_hello(world, identity))))
        if reads:
            reader = asyncio.run_coroutine_threadsafe(discard_messages(), loop)
        yield send
    finally:
        if reader:
            reader.cancel()
        run(transport.close())
        run(asyncio.sleep(0))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def build_hello(world, identity, **changes):
    """Return a valid hello of this identity, with `changes`."""
    fields = {
        "protocols": list(SPOKEN_PROTOCOLS),
        "version": "1",
        "run": "01890000-0000-7000-8000-000000000001",
        "spec": digest(world.spec.to_json()),
        "incarnation": "9" * 16,
        "ticket": world.ticket(identity.key, 9),
        "addresses": [],
    }
    return messages.Hello(**(fields | changes))


def assert_refused(machine, caplog, messages, reason, hello=None):
    """Send messages, and assert that the connection ends for that reason and nothing changed."""
    caplog.set_level(logging.INFO, "barnraise.exchange")
    world = machine.world
    before = (machine.ledger.vector(), machine.anchor.digest())
    channels = []
    with connect_raw_peer(world, machine, hello=hello, reads=False, channels=channels) as send:
        for message in messages:
            send(message)
        channel, run = channels[0]

        async def receive_until_closed():
            while True:
                await channel.receive()

        with pytest.raises(ChannelClosedError):
            run(asyncio.wait_for(receive_until_closed(), 15))
    machine.step()
    assert (machine.ledger.vector(), machine.anchor.digest()) == before
    wait_until(lambda: any(reason in record.getMessage() for record in caplog.records))
    wait_until(lambda: machine.exchange.stats.peers == 0)


def limit_peers(monkeypatch: pytest.MonkeyPatch, service: Service, rate: Rate) -> None:
    """Let each peer use less of a service than usual, until the test ends."""
    monkeypatch.setitem(SERVICE_LIMITS, service, {"peer": rate})
