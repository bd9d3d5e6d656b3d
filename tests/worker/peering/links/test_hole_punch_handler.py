"""Test dials through routers with whole exchanges, in memory: see `dial_now_handler`."""

import time

import pytest
from helpers.network.raw_peer import connect_raw_peer
from helpers.wait_for import wait_until

from barnraise.protocol.messages import DialNow, DialNowRelay
from barnraise.protocol.signing import Identity

SECONDS = 60.0
RUN = "01890000-0000-7000-8000-000000000001"  # of the world


@pytest.fixture
def short_waits():
    """Wait as long as in use: what routers have opened is closed again after some seconds."""


def test_two_peers_behind_routers_meet_through_a_third(world):
    common, a, b = (world.machine(n).start() for n in (1, 2, 3))
    world.network.natted = {a.identity.key, b.identity.key}
    a.add_peers(common)
    b.add_peers(common)
    wait_until(lambda: b.identity.key in a.exchange.server.peers.connections, SECONDS)
    assert common.exchange.server.peers.hole_punching.passed >= 1


def test_peer_sees_and_reports_where_another_connects_from(world):
    _, a = world.start_linked(2, 1)
    wait_until(lambda: a.exchange.reach_facts.observations, SECONDS)
    (seen,) = a.exchange.reach_facts.observations
    assert seen.address == a.exchange.addresses()[0]
    a.exchange.set_source_ip("5.9.1.1")
    a.exchange.set_source_ip("")


def statement(signer: Identity, to: str, **changes) -> DialNowRelay:
    """Sign a statement that asks a target to dial."""
    fields = {
        "target": to,
        "run": RUN,
        "peer": signer.key,
        "addresses": ["203.0.113.7:53"],
        "issued": time.time(),
    }
    return DialNowRelay(statement=signer.sign("dial_now", DialNow(**fields | changes)))


@pytest.mark.parametrize(
    ("signer", "changes", "reason"),
    [
        (9, {"peer": "a" * 64}, "names another key"),
        (9, {"run": "01890000-0000-7000-8000-000000000002"}, "names another key or run"),
        (8, {"target": "a" * 64}, "is for a third one"),
    ],
)
def test_false_statement_ends_the_connection(world, caplog, signer, changes, reason):
    machine = world.machine(1).start()
    identity = Identity(bytes([signer]) * 32)
    with connect_raw_peer(world, machine) as send:
        send(statement(identity, machine.identity.key, **changes))
        wait_until(lambda: reason in caplog.text, SECONDS)
    assert machine.exchange.server.peers.hole_punching.obeyed == 0


def test_old_statement_and_a_flood_of_them_are_ignored(world, caplog):
    machine = world.machine(1).start()
    signer = Identity(bytes([8]) * 32)
    target = machine.identity.key
    with connect_raw_peer(world, machine) as send:
        send(statement(signer, target, issued=time.time() - 3600))
        send(statement(signer, target, issued=time.time() + 3600))
        for _ in range(20):
            send(statement(signer, target, is_answer=True))
        send(statement(signer, target, peer="a" * 64))  # ends the connection
        wait_until(lambda: "names another key" in caplog.text, SECONDS)
    assert 1 <= machine.exchange.server.peers.hole_punching.obeyed <= 2
