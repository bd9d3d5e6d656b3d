"""Peers learn while they are linked that a machine is reached at another address."""

import asyncio

from helpers.network.memory_transport import MemoryChannel
from helpers.wait_for import wait_until

from barnraise.peering.links import address_watch
from barnraise.peering.links.connection import Connection

SECONDS = 60.0
NEW = "93.184.216.34:45555"


def test_new_address_is_announced_to_linked_peers(world, monkeypatch):
    monkeypatch.setattr(address_watch, "WATCH_SECONDS", 0.05)
    peer, machine = world.start_linked(2, 1)
    wait_until(lambda: peer.exchange.stats.peers == 1, SECONDS)

    def announced() -> list[str]:
        connection = peer.exchange.server.peers.connections.get(machine.identity.key)
        return connection.hello.addresses if connection else []

    assert NEW not in announced()
    machine.exchange.server.peers.reachability.set_mapped(NEW)
    wait_until(lambda: NEW in announced(), SECONDS)


def test_address_that_changed_before_the_first_look_is_announced(world, monkeypatch):
    monkeypatch.setattr(address_watch, "WATCH_SECONDS", 0.01)
    _, machine = world.start_linked(2, 1)
    wait_until(lambda: machine.exchange.stats.peers == 1, SECONDS)
    connections = machine.exchange.server.peers.connections
    (connection,) = connections.values()

    async def count_introductions(addresses: list[str]) -> int:
        """Return how many introductions three looks at these addresses cause."""
        introduced: list[Connection] = []
        looks: list[int] = []

        def list_addresses() -> list[str]:
            looks.append(1)
            return addresses

        watch = address_watch.AddressWatch(
            connections, list_addresses, introduced.append, lambda moved: None
        )
        watching = asyncio.create_task(watch.run())
        while len(looks) < 3:
            await asyncio.sleep(0.01)
        watching.cancel()
        return len(introduced)

    stated = list(connection.stated_addresses)
    assert NEW not in stated
    assert asyncio.run(count_introductions([*stated, NEW])) >= 2
    assert asyncio.run(count_introductions(stated)) == 0


def test_error_of_an_optional_part_leaves_the_exchange_running(world, monkeypatch, caplog):
    def fail(channel: MemoryChannel) -> bool:
        raise ValueError("the path is no address")

    monkeypatch.setattr(address_watch, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(MemoryChannel, "refresh_remote_address", fail)
    peer, machine = world.start_linked(2, 1)
    wait_until(lambda: caplog.text.count("goes on without noticing that addresses") == 2, SECONDS)
    peer.publish_round(1)
    world.wait_for_agreement(machine, peer, seconds=SECONDS)
    assert machine.ledger.vector() == {peer.exchange.author.name: 1}
