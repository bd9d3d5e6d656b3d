"""A peer that connects and does not introduce itself keeps nobody else out."""

import asyncio
import time

import pytest
from helpers.network.memory_transport import MemoryNetwork
from helpers.wait_for import wait_until

from barnraise.peering.limits.service_limits import SERVICE_LIMITS, WAITING_LIMITS, Service
from barnraise.peering.links.pending_handshakes import FLOODERS, IncomingGreetings
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.peering.transports.transport import ChannelClosedError
from barnraise.protocol.messages import Peer


@pytest.mark.slow
def test_flood_of_silent_greetings_keeps_no_honest_machine_out(world):
    """130 keys of one host connect over QUIC, send two bytes, and do so again when closed."""
    world.transport = lambda identity: IrohTransport(identity.secret, "127.0.0.1")
    a = world.machine(1).start()
    victim = Peer(key=a.identity.key, addresses=a.exchange.addresses()[:1])

    async def flood(seconds: float) -> None:
        transports = [IrohTransport(bytes([9, n]) * 16, "127.0.0.1") for n in range(13)]
        for transport in transports:
            await transport.start()

        async def greet(transport: IrohTransport) -> None:
            while True:
                try:
                    channel = await transport.connect(victim)
                    await channel.send(b"")
                    await channel.receive()
                    while True:
                        await channel.receive()
                except ChannelClosedError:
                    await asyncio.sleep(0.05)

        tasks = [asyncio.create_task(greet(t)) for t in transports for _ in range(10)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for transport in transports:
            await transport.close()

    async def join_under_attack() -> float:
        attack = asyncio.create_task(flood(6.0))
        await asyncio.sleep(1.5)
        started_at = time.monotonic()
        await asyncio.to_thread(lambda: world.machine(2).start().add_peers(a))
        await asyncio.to_thread(wait_until, lambda: a.exchange.stats.peers == 1, 20)
        seconds = time.monotonic() - started_at
        await attack
        return seconds

    assert asyncio.run(join_under_attack()) < 15


async def test_key_that_connects_too_often_is_refused_and_others_are_not():
    network = MemoryNetwork()
    me, often, other = (network.transport(f"b{n:063x}") for n in (1, 2, 3))
    for transport in (me, often, other):
        await transport.start()
    greetings = IncomingGreetings()
    admitted = []
    for transport in (often,) * 20 + (other,):
        await transport.connect(Peer(key=me.key, addresses=me.addresses()))
        admitted.append(greetings.admit(await me.accept(), 0.0))
    assert admitted == [True] * int(SERVICE_LIMITS[Service.INTRODUCTIONS]["key"].burst) + [
        False
    ] * 4 + [True]
    assert len(greetings) == WAITING_LIMITS[Service.INTRODUCTIONS]["key"] + 1


async def test_key_that_flooded_stays_away_longer_each_time():
    network = MemoryNetwork()
    me, flooder, other = (network.transport(f"b{n:063x}") for n in (1, 2, 3))
    for transport in (me, flooder, other):
        await transport.start()
    greetings = IncomingGreetings()

    async def is_admitted(transport, now: float) -> bool:
        await transport.connect(Peer(key=me.key, addresses=me.addresses()))
        return greetings.admit(await me.accept(), now)

    now = 0.0
    for away in (30.0, 60.0, 120.0):
        greetings.on_flood(flooder.key, now)
        assert not await is_admitted(flooder, now + away - 1)
        assert await is_admitted(other, now + away - 1)
        now += away
        assert await is_admitted(flooder, now)
    for _ in range(20):
        greetings.on_flood(flooder.key, now)
    assert await is_admitted(flooder, now + FLOODERS.most_seconds), "it has a way back"
