"""Peers dial a machine back, over a network in memory and over iroh: see `dial_back_handler`."""

import asyncio
import time
from types import SimpleNamespace

from helpers.network.raw_peer import connect_raw_peer
from helpers.wait_for import wait_until

from barnraise.peering.addresses.nat_type import DialBackVerdict, judge_dial_backs
from barnraise.peering.transports.framing import unpack
from barnraise.protocol.messages import DialBackErrand, DialBackRequest, DialBackResult
from barnraise.protocol.signing import Identity

SECONDS = 60.0
VICTIM = Identity(bytes([5]) * 32).key


def link_trio(world):
    """Return a machine, the peer that it is linked to, and a peer of that one."""
    machine, peer, stranger = (world.machine(number).start() for number in (1, 2, 3))
    stranger.add_peers(peer)
    machine.add_peers(peer)
    return machine, peer, stranger


def judge(machine) -> DialBackVerdict:
    """Return what a machine's test of itself has shown so far."""
    return judge_dial_backs(machine.exchange.reach_facts)[0]


def test_machine_is_reached_by_peers_that_it_has_dial_it(world):
    machine, *peers = link_trio(world)
    wait_until(lambda: judge(machine) is DialBackVerdict.REACHED, SECONDS)
    assert sum(peer.exchange.server.peers.dial_back.served for peer in peers) >= 1


def test_machine_behind_a_router_is_not_reached(world):
    world.network.natted = {Identity(bytes([1]) * 32).key}
    machine = link_trio(world)[0]
    wait_until(lambda: judge(machine) is not DialBackVerdict.UNTESTED, SECONDS)
    assert judge(machine) is DialBackVerdict.NOT_REACHED


def test_machine_alone_is_not_tested(world):
    machine = world.machine(1).start()
    assert machine.exchange.test_reachability() == 0
    assert judge_dial_backs(machine.exchange.reach_facts) == (DialBackVerdict.UNTESTED, 0)


def test_peer_that_claims_a_dial_that_did_not_arrive_is_not_believed(world):
    machine = world.machine(1).start()
    with connect_raw_peer(world, machine) as send:
        wait_until(lambda: machine.exchange.stats.peers == 1, SECONDS)
        handler = machine.exchange.server.peers.dial_back
        asked = SimpleNamespace(count=None)

        async def test() -> None:
            asked.count = await handler.test()

        machine.exchange.thread.call(lambda: asyncio.ensure_future(test()))
        while asked.count is None:
            send(DialBackResult(outcome="reached", by_another=True))
            send(DialBackResult(number=7, outcome="reached"))
            time.sleep(0.05)
    assert asked.count == 0 and machine.exchange.reach_facts.dial_backs == ()


def test_flood_of_requests_and_errands_is_refused(world, caplog):
    machine = world.machine(1).start()
    with connect_raw_peer(world, machine) as send:
        for number in range(40):
            send(DialBackRequest(ports=[number + 1], met=[]))
            host = f"93.184.{number}.34"
            send(DialBackErrand(number=number, peer=VICTIM, addresses=[f"{host}:53"]))
            send(DialBackErrand(number=number, peer=VICTIM, addresses=["192.168.1.9:53"]))
        send(DialBackErrand(number=1, peer=VICTIM, addresses=["5.9.1.1:1", "5.9.1.2:1"]))
        wait_until(lambda: "names several hosts" in caplog.text, SECONDS)
    assert machine.exchange.server.peers.dial_back.served <= 3 + 4


def test_relayed_peer_has_no_private_address_dialled(world):
    """Nobody knows where it is: it may be on the internet, and the address in this home."""
    world.network.relayed = {Identity(bytes([9]) * 32).key}
    machine = world.machine(1).start()
    channels = []
    with connect_raw_peer(world, machine, reads=False, channels=channels) as send:
        channel, run = channels[0]

        async def receive_result() -> DialBackResult:
            while True:
                message, _ = unpack(await channel.receive())
                if isinstance(message, DialBackResult):
                    return message

        outcomes: dict[str, str] = {}
        for address in ("192.168.1.9:53", "127.0.0.1:53", "93.184.216.34:53"):
            send(DialBackErrand(number=1, peer=VICTIM, addresses=[address]))
            outcomes[address] = run(receive_result()).outcome
    assert list(outcomes.values()) == ["refused", "refused", "not_reached"]
    assert machine.exchange.server.peers.dial_back.served == 1
