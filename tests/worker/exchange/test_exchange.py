"""Whole exchanges with real files, threads and signatures: in memory, and once over iroh."""

import shutil
import threading
import time

import pytest
from helpers.network.raw_peer import connect_raw_peer
from helpers.wait_for import wait_until, within

from barnraise.errors import StateError
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.protocol import messages

# ---- agreement


def test_three_exchanges_agree_bit_for_bit(world):
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    b.add_peers(a)
    c.add_peers(a)
    for seed in range(4):
        for machine in (a, b, c):
            machine.publish_round(100 * machine.number + seed)
            machine.step()
    world.wait_for_agreement(a, b, c)
    assert a.anchor.tokens == a.ledger.tokens == 12 * 100
    stats = a.exchange.stats
    assert (stats.updates_sent, stats.updates_received, stats.updates_behind) == (4, 8, 0)
    assert stats.bytes_sent > 0 and stats.bytes_received > 0
    # b and c learn each other's address from a.
    wait_until(lambda: all(machine.exchange.stats.peers == 2 for machine in (a, b, c)))


def test_three_exchanges_over_iroh_agree(world):
    world.transport = lambda identity: IrohTransport(identity.secret, "127.0.0.1")
    a, b, c = world.start_linked(1, 2, 3)
    for seed in range(3):
        for machine in (a, b, c):
            machine.publish_round(100 * machine.number + seed)
    world.wait_for_agreement(a, b, c)


def test_exchanges_on_a_slow_lossy_network_agree(world):
    world.network.bandwidth, world.network.delay, world.network.loss = 2e5, 0.02, 0.1
    a, b = world.start_linked(1, 2)
    for seed in range(5):
        a.publish_round(seed)
        b.publish_round(100 + seed)
    world.wait_for_agreement(a, b, seconds=60.0)


def test_exchange_after_a_partition_catches_up(world):
    a, b, c = world.start_agreed(1, 2, 3)
    world.network.partition({a.identity.key, b.identity.key}, {c.identity.key})
    for seed in range(3):
        a.publish_round(10 + seed)
        c.publish_round(20 + seed)
    world.wait_for_agreement(a, b)
    assert c.anchor.vector != a.anchor.vector
    world.network.heal()
    world.wait_for_agreement(a, b, c)


def test_update_of_a_departed_author_arrives_through_a_third_peer(world):
    a, b = world.start_agreed(1, 2)
    a.stop()
    # c has never met the author, whose ticket is sent with the update.
    c = world.machine(3).start().add_peers(b)
    world.wait_for_agreement(b, c)


def test_is_synchronized_once_all_peers_are_complete_and_equal(world):
    a, b = world.start_agreed(1, 2)
    assert not a.exchange.is_synchronized()
    a.exchange.announce_completion()
    b.exchange.announce_completion()
    wait_until(lambda: a.exchange.is_synchronized() and b.exchange.is_synchronized())


def test_weight_of_new_peers_is_equal_at_least_and_one_alone(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    assert a.exchange.compute_weight(100.0) == 1.0
    a.exchange.announce_rate(100.0)
    b.exchange.announce_rate(300.0)
    b.add_peers(a)
    wait_until(
        lambda: a.exchange.compute_weight(100.0) == 0.5 and b.exchange.compute_weight(300.0) == 0.75
    )
    b.stop()
    wait_until(lambda: a.exchange.compute_weight(100.0) == 1.0)


def test_update_in_flight_is_predicted_for_its_fragments_until_it_arrives(world):
    a, b = world.start_linked(1, 2)
    b.exchange.announce_rate(100.0)
    a.exchange.announce_rate(300.0)
    b.publish_round(1)
    for seed in range(2):
        a.publish_round(10 + seed)
        world.wait_for_agreement(a, b)
        time.sleep(1.0)  # one round of a; its update is predicted until it is four rounds late
    assert b.exchange.predict_in_flight(100.0) == (0.0, 0.0, 0.0)
    world.network.uplinks[a.identity.key] = 2000.0
    a.publish_round(20, due=[1])  # 3 kB
    wait_until(lambda: any(b.exchange.predict_in_flight(100.0)))
    first, block, last = b.exchange.predict_in_flight(100.0)
    assert first == last == 0 < block and b.anchor.vector[a.exchange.author.name] == 2
    world.wait_for_agreement(a, b)
    assert b.anchor.vector[a.exchange.author.name] == 3
    assert b.exchange.predict_in_flight(100.0) == (0.0, 0.0, 0.0)


# ---- crashes


def test_restarted_exchange_continues_from_its_directory(world):
    a, b = world.start_linked(1, 2)
    for seed in range(3):
        a.publish_round(seed)
        b.publish_round(10 + seed)
    world.wait_for_agreement(a, b)
    applied = a.anchor.vector
    a.stop()  # no checkpoint is saved, so the ledger replays everything
    b.publish_round(20)
    a.open()
    a.start()
    b.add_peers(a)
    world.wait_for_agreement(a, b)
    assert a.anchor.vector[b.exchange.author.name] == 4
    a.publish_round(30)
    world.wait_for_agreement(a, b)
    assert a.exchange.author.name in applied and a.anchor.vector[a.exchange.author.name] == 4, (
        "the incarnation is the same"
    )


def test_start_replays_only_updates_that_the_anchor_lacks(world):
    a = world.machine(1).start()
    for seed in range(3):
        a.publish_round(seed)
    a.stop()
    a.open()
    a.exchange.start({a.exchange.author.name: 2})
    assert [arrival.header.seq for arrival in a.exchange.poll_updates()] == [3]
    assert a.exchange.poll_updates() == []


def test_updates_that_arrive_while_the_state_is_closed_are_given_once(world):
    a, b = world.start_agreed(1, 2)
    for seed in range(3):
        a.publish_round(seed)  # nobody polls b, whose engine is closed
    wait_until(lambda: b.ledger.vector() == a.ledger.vector())
    b.exchange.suspend_updates()
    b.exchange.start(b.anchor.vector)
    given = [(update.header.author, update.header.seq) for update in b.exchange.poll_updates()]
    assert len(given) == len(set(given)) == 3
    assert not b.exchange.poll_updates()


def test_rolled_back_directory_gets_a_new_incarnation_and_its_updates(world):
    a, b = world.start_agreed(1, 2)
    a.stop()
    shutil.copytree(a.folder, world.folder / "copy")
    a.open()
    a.start()
    b.add_peers(a)
    a.publish_round(2)
    world.wait_for_agreement(a, b)
    a.stop()
    shutil.rmtree(a.folder)
    shutil.copytree(world.folder / "copy", a.folder)
    a.open(reincarnate=lambda: "f" * 16)
    old = a.exchange.author.name
    a.start().add_peers(b)
    wait_until(lambda: a.exchange.author.name != old)
    a.publish_round(3)
    world.wait_for_agreement(a, b)
    assert a.exchange.author.name.endswith("f" * 16) and b.anchor.vector == {
        old: 2,
        a.exchange.author.name: 1,
    }


def test_unproven_claim_of_own_updates_keeps_the_incarnation(world):
    a = world.machine(1).start()
    a.publish_round(1)
    with connect_raw_peer(world, a) as send:
        send(messages.PeerState(vector={a.exchange.author.name: 99}, rate=1.0))
        time.sleep(0.5)
    assert a.exchange.author.name.endswith(a.incarnation)


def test_server_failure_while_running_does_not_stop_training(world, monkeypatch):
    a = world.machine(1).start()

    async def fail():
        raise OSError("the network card was removed")

    monkeypatch.setattr(a.exchange.server.peers.transport, "close", fail)
    a.exchange.thread.call(a.exchange.server.stop)
    wait_until(lambda: not a.exchange.thread.is_alive())
    a.publish_round(1)
    assert a.exchange.addresses() is not None
    assert a.exchange.compute_weight(1.0) == 1.0
    assert a.exchange.poll_updates() == []


def test_stop_ends_all_threads_and_may_be_called_twice(world):
    before = set(threading.enumerate())
    a, b = world.start_agreed(1, 2)
    assert set(threading.enumerate()) - before
    with within(20):
        a.exchange.stop()
        b.exchange.stop()
        b.exchange.stop()
    assert not set(threading.enumerate()) - before
    b.exchange.announce_rate(1.0)  # has no effect
    assert b.exchange.poll_updates() == []


def test_start_without_a_listening_transport_raises_at_once(world):
    a = world.machine(1).start()
    same_key = world.machine(1, "elsewhere")
    with pytest.raises(OSError, match="on this network already"):
        same_key.start()
    assert a.exchange.stats.peers == 0


def test_start_with_an_anchor_before_the_ledgers_base_is_refused(world):
    a = world.machine(1).start()
    signed = a.publish_round(1)
    b = world.machine(2)
    digests = [b.ledger.blobs.store(bytes([i])) for i in range(len(b.anchor.fragments))]
    b.ledger.rebase([(a.ledger.header(signed.author, 1), signed)], digests)
    with pytest.raises(StateError, match="join again from an empty folder"):
        b.start()
