"""Peers recognise a key on two machines, and nobody without the key can pretend that."""

import time

from helpers.network.raw_peer import connect_raw_peer
from helpers.wait_for import wait_until

from barnraise.peering.membership import worker_sessions
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.protocol.messages import COPIED_KEY, CopiedKeyNotice, WorkerSession
from barnraise.protocol.signing import Identity

SECONDS = 60.0
RUN = "01890000-0000-7000-8000-000000000001"  # of the world


def test_two_machines_with_one_key_are_warned_and_the_newer_stops(world, monkeypatch, caplog):
    monkeypatch.setattr(worker_sessions, "CLOCK_SECONDS", 0.2)  # one clock
    world.transport = lambda identity: IrohTransport(identity.secret, host="127.0.0.1")
    common = world.machine(3).start()
    original = world.machine(1, "original").start().add_peers(common)
    wait_until(lambda: common.exchange.stats.peers == 1, SECONDS)
    time.sleep(0.3)  # the copy starts later by more than the clocks differ
    copy = world.machine(1, "copy").start().add_peers(common)
    wait_until(lambda: copy.exchange.copied_key == COPIED_KEY, SECONDS)
    wait_until(lambda: caplog.text.count(COPIED_KEY) >= 2, SECONDS)
    assert original.exchange.copied_key is None
    assert original.publish_round(1).author == original.exchange.author.name


def test_update_of_this_key_from_elsewhere_is_a_warning(world, monkeypatch, caplog):
    monkeypatch.setattr(worker_sessions, "CLOCK_SECONDS", -SECONDS)
    twin = world.machine(1, "twin")
    twin.incarnation = "e" * 16
    twin.stop()
    twin.open()
    update = twin.publish_round(1)
    twin.exchange.stop()
    machine = world.machine(1).start()
    copied_keys = machine.exchange.server.peers.copied_keys
    copied_keys.on_own_update(machine.publish_round(2))
    assert COPIED_KEY not in caplog.text
    copied_keys.on_own_update(update)
    assert COPIED_KEY in caplog.text and machine.exchange.copied_key is None


def notice(signer: Identity, **changes) -> CopiedKeyNotice:
    """Sign a statement of another session."""
    now = time.time()
    fields = {
        "run": RUN,
        "peer": signer.key,
        "session": "e" * 16,
        "started": now - 3600,
        "issued": now,
    }
    statement = WorkerSession(**fields | changes)
    return CopiedKeyNotice(statement=signer.sign("session", statement))


def test_stranger_can_neither_forge_nor_replay_a_proof(world, caplog):
    machine = world.machine(1).start()
    own = machine.exchange.server.peers.copied_keys.sign_session()
    with connect_raw_peer(world, machine) as send:
        send(CopiedKeyNotice(statement=own))
        send(notice(machine.identity, issued=time.time() - 3600))  # from before a restart
        send(notice(machine.identity, issued=time.time()))  # too soon after the start
        send(notice(Identity(b"x" * 32)))
        wait_until(lambda: "names another key or run" in caplog.text, SECONDS)
    with connect_raw_peer(world, machine, number=10) as send:
        forged = notice(Identity(b"x" * 32)).statement.model_copy(
            update={"key": machine.identity.key}
        )
        send(CopiedKeyNotice(statement=forged))
        wait_until(lambda: "signature" in caplog.text, SECONDS)
    assert machine.exchange.copied_key is None and COPIED_KEY not in caplog.text
