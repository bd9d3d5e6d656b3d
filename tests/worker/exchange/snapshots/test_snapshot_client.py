"""Joining late: snapshots of the anchor are requested, compared, fetched and continued from."""

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.poisoned_machine import is_poisoned, poison
from helpers.wait_for import join_peers, stepping, wait_until

from barnraise.exchange.gossip import requests
from barnraise.exchange.snapshots import snapshot_client as client_module
from barnraise.exchange.snapshots import snapshot_server
from barnraise.exchange.snapshots.snapshot_client import SnapshotTrust, choose_majority
from barnraise.exchange.snapshots.snapshot_server import (
    PendingRequest,
    SnapshotServer,
    blob_digests,
)
from barnraise.ledger.anchor import fragment_to_bytes
from barnraise.peering.limits import rate_limit
from barnraise.peering.limits.service_limits import SERVICE_LIMITS, Service
from barnraise.protocol.messages import SnapshotManifest


def test_late_machine_starts_from_the_peers_anchor(world):
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    b.add_peers(a)
    c.add_peers(a)
    for seed in range(5):
        for machine in (a, b, c):
            machine.publish_round(10 * seed + machine.number)
    world.wait_for_agreement(a, b, c)
    late = world.machine(4)
    with stepping(a, b, c):
        snapshot = join_peers(late, a, b, c)
    assert snapshot.confirmed and late.ledger.base_snapshot() is not None
    late.publish_round(99)
    a.publish_round(98)
    world.wait_for_agreement(a, b, c, late)
    assert late.ledger.tokens == a.ledger.tokens == 17 * 100


def test_snapshots_of_training_peers_at_one_vector_are_equal(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.add_peers(a)
    for seed in range(3):
        a.publish_round(seed)
        b.publish_round(10 + seed)
    world.wait_for_agreement(a, b)
    seeds = iter(range(1000, 2000))

    def train(machine):
        if len(machine.ledger.vector()) and machine.ledger.tokens < 6000:
            machine.publish_round(next(seeds))

    late = world.machine(3)
    with stepping(a, b, then=train):
        snapshot = join_peers(late, a, b)
    assert snapshot.confirmed
    world.wait_for_agreement(a, b, late)


def test_joiner_survives_a_restart_and_serves_the_next_joiner(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.add_peers(a)
    a.publish_round(1)
    world.wait_for_agreement(a, b)
    with stepping(a, b):
        join_peers(world.machine(3), a, b)
    c = world.machines[2]
    c.publish_round(5)
    c.stop()
    c.open()
    with stepping(a, b):
        again = join_peers(c, a, b)
    assert again is not None and again.heads.keys() == {a.exchange.author}, (
        "its folder contains the snapshot that it started from"
    )
    world.wait_for_agreement(a, b, c)
    d = world.machine(4)
    with stepping(c):
        # a and b are connected, but their loops take no steps.
        snapshot = join_peers(d, c, timeout=9.0, trust_one=True)
    assert snapshot is None, "one of three volunteers confirms nothing"
    with stepping(a, b, c):
        snapshot = d.exchange.fetch_snapshot(20.0)
    assert snapshot is not None and snapshot.confirmed


def test_snapshot_of_one_peer_is_logged_as_unconfirmed(world, caplog):
    a = world.machine(1).start()
    a.publish_round(1)
    with stepping(a):
        snapshot = join_peers(world.machine(2), a, trust_one=True)
    assert not snapshot.confirmed
    assert any("unconfirmed" in record.getMessage() for record in caplog.records)


def test_two_machines_of_one_volunteer_do_not_confirm_a_snapshot(world):
    a, b = world.machine(1), world.machine(2)
    b.exchange.renew_ticket(world.ticket(b.identity.key, volunteer=1))
    a.start()
    b.start().add_peers(a)
    a.publish_round(1)
    world.wait_for_agreement(a, b)
    with stepping(a, b):
        snapshot = join_peers(world.machine(3), a, b, trust_one=True)
    assert snapshot is not None and not snapshot.confirmed


def test_peer_with_a_different_anchor_is_outvoted(world):
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    b.add_peers(a)
    c.add_peers(a, b)
    a.publish_round(1)
    world.wait_for_agreement(a, b, c)
    c.anchor.fragments[0][5] += 1  # bit-rot
    with stepping(a, b, c):
        snapshot = join_peers(world.machine(4), a, b, c)
    assert snapshot.confirmed
    assert bytes(fragment_to_bytes(snapshot.fragments[0])) == bytes(
        fragment_to_bytes(a.anchor.fragments[0])
    )


def test_two_disagreeing_peers_are_both_not_believed(world, caplog):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.add_peers(a)
    a.publish_round(1)
    world.wait_for_agreement(a, b)
    b.anchor.fragments[0][5] += 1  # bit-rot
    with stepping(a, b):
        snapshot = join_peers(world.machine(3), a, b, timeout=8.0, trust_one=True)
    assert snapshot is None
    assert any("disagree" in record.getMessage() for record in caplog.records)


def test_fetch_snapshot_at_the_runs_start_or_alone_returns_none(world):
    a, b = world.machine(1).start(), world.machine(2)
    b.add_peers(a)
    started_at = time.monotonic()
    assert b.exchange.fetch_snapshot(20.0) is None
    assert time.monotonic() - started_at < 18
    alone = world.machine(3)
    assert alone.exchange.fetch_snapshot(0.5) is None


def test_fetch_snapshot_from_a_silent_peer_ends_in_time(world):
    a = world.machine(1).start()  # connected, but its loop takes no steps
    a.publish_round(1)
    late = world.machine(2)
    late.add_peers(a)
    started_at = time.monotonic()
    assert late.exchange.fetch_snapshot(2.0) is None
    assert time.monotonic() - started_at < 20


def test_copy_anchor_copies_once_for_all_requests_and_never_without(world):
    a = world.machine(1).start()
    server, now = a.exchange.server.snapshot_server, time.monotonic()
    assert server.copy_anchor(a.anchor, now) is None
    for peer in "bcd":
        server.add_request(PendingRequest(peer * 64, None, now + 30), now)
    frozen, pending = server.copy_anchor(a.anchor, now)
    assert [request.peer[0] for request in pending] == ["b", "c", "d"]
    assert frozen.fragments[0].data_ptr() != a.anchor.fragments[0].data_ptr()
    assert server.copy_anchor(a.anchor, now) is None


def test_snapshot_server_holds_one_copy_and_one_request_per_peer(world):
    a = world.machine(1).start()
    server, now = a.exchange.server.snapshot_server, time.monotonic()
    server.add_request(PendingRequest("b" * 64, None, now + 30), now)
    frozen, _ = server.copy_anchor(a.anchor, now)
    for _ in range(100):
        server.add_request(PendingRequest("b" * 64, None, now + 30), now)
    assert len(server.pending_requests) == 1
    assert server.copy_anchor(a.anchor, now) is None, "the first copy is still in use"
    del frozen
    assert server.copy_anchor(a.anchor, now) is not None


def test_flood_of_snapshot_requests_copies_the_anchor_a_few_times(world):
    """Each copy stops the training loop and writes the whole model to the disk."""
    a = world.machine(1).start()
    for seed in range(12):
        a.publish_round(seed)
    server, now, copies = a.exchange.server.snapshot_server, time.monotonic(), 0
    for seq in range(1, 13):
        for key in "bc":  # of one volunteer
            vector = {a.exchange.author: seq}
            server.add_request(PendingRequest(key * 64, vector, now + 30, "flooder"), now)
            copies += server.copy_anchor(a.anchor, now) is not None
    assert copies <= SERVICE_LIMITS[Service.SNAPSHOTS]["volunteer"].burst
    server.add_request(PendingRequest("d" * 64, None, now + 30, "honest"), now)
    frozen, pending = server.copy_anchor(a.anchor, now)
    assert frozen.vector == a.anchor.vector and [request.peer[0] for request in pending] == ["d"]


def test_large_slow_fragment_arrives_beyond_the_timeout(world, monkeypatch):
    a = world.machine(1).start()
    a.publish_round(1)
    largest = max(4 * fragment.numel() for fragment in a.anchor.fragments)
    monkeypatch.setattr(client_module, "MAX_HEADS_BYTES", largest - 1)
    monkeypatch.setattr(client_module, "MIN_FETCH_SECONDS", 0.5)
    monkeypatch.setattr(client_module, "MIN_FETCH_RATE", 1000)
    monkeypatch.setattr(rate_limit, "PIECE_BYTES", 1000)
    world.network.bandwidth = (
        largest / 3
    )  # the transfer takes three seconds, and the join waits for two
    with stepping(a):
        assert join_peers(world.machine(2), a, timeout=4.0, trust_one=True) is not None


def test_fetch_snapshot_returns_soon_after_should_stop(world):
    a, late = world.machine(1).start(), world.machine(2)
    a.publish_round(1)
    late.add_peers(a)  # its loop never answers
    leaving = threading.Event()
    threading.Timer(0.5, leaving.set).start()
    started_at = time.monotonic()
    assert late.exchange.fetch_snapshot(30.0, leaving.is_set) is None
    assert time.monotonic() - started_at < 20


def test_request_ahead_of_the_anchor_waits_until_it_expires(world):
    a = world.machine(1).start()
    server, now = SnapshotServer(a.ledger, {}, asyncio.to_thread), time.monotonic()
    server.add_request(PendingRequest("b" * 64, {a.exchange.author: 1}, now + 30), now)
    assert server.copy_anchor(a.anchor, now) is None
    a.publish_round(1)
    assert server.copy_anchor(a.anchor, now) is not None
    server.add_request(PendingRequest("b" * 64, {a.exchange.author: 9}, now + 30), now)
    assert server.copy_anchor(a.anchor, now + 31) is None and not server.pending_requests


def test_snapshot_before_the_ledgers_base_is_not_served(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.add_peers(a)
    for seed in range(3):
        a.publish_round(seed)
    world.wait_for_agreement(a, b)
    with stepping(a, b):
        join_peers(world.machine(3), a, b)
    c = world.machines[2]
    server, now = c.exchange.server.snapshot_server, time.monotonic()
    server.add_request(PendingRequest("d" * 64, {a.exchange.author: 1}, now + 30), now)
    frozen, _ = server.copy_anchor(c.anchor, now)
    assert server.build_snapshot(frozen, {a.exchange.author: 1}, now) is None


def test_old_snapshots_bytes_are_deleted(world):
    a = world.machine(1).start()
    server = a.exchange.server.snapshot_server
    snapshots: list[SnapshotManifest] = []
    for seed in range(snapshot_server.MAX_SNAPSHOTS + 2):
        a.publish_round(seed)
        server.add_request(PendingRequest("b" * 64, dict(a.anchor.vector), 1e9), 1e6)
        frozen, _ = server.copy_anchor(a.anchor, 1e6)
        snapshots.append(server.build_snapshot(frozen, frozen.vector, 1e6))
        del frozen
    assert not server.blobs.has(snapshots[0].fragments[0]) and not server.blobs.has(
        snapshots[0].heads
    )
    assert all(
        server.blobs.has(blob)
        for snapshot in snapshots[-snapshot_server.MAX_SNAPSHOTS :]
        for blob in (*snapshot.fragments, snapshot.heads)
    )


def build_snapshot(machine, now: float) -> SnapshotManifest | None:
    """Build a snapshot of a machine's anchor as it is now, for a stranger."""
    server = machine.exchange.server.snapshot_server
    server.add_request(PendingRequest("b" * 64, dict(machine.anchor.vector), 1e9), now)
    frozen, _ = server.copy_anchor(machine.anchor, now)
    return server.build_snapshot(frozen, frozen.vector, now)


def list_blobs(server: SnapshotServer) -> set[str]:
    """Return the digests of all blobs on a snapshot server's disk."""
    return {path.name for path in server.blobs.folder.glob("*/*")}


def test_snapshot_that_nobody_uses_expires(world):
    a = world.machine(1).start()
    server = a.exchange.server.snapshot_server
    a.publish_round(1)
    old = build_snapshot(a, 1e6)
    a.publish_round(2, due=[0])
    new = build_snapshot(a, 1e6 + 500)
    shared = set(old.fragments) & set(new.fragments)
    assert shared and list_blobs(server) == {*blob_digests(old), *blob_digests(new)}
    server.record_use(old.heads, 1e6 + 400)  # a joiner still downloads it
    server.delete_expired(1e6 + 900)
    assert list_blobs(server) == {*blob_digests(old), *blob_digests(new)}
    server.delete_expired(1e6 + 1000)
    assert list_blobs(server) == set(blob_digests(new))
    server.delete_expired(1e6 + 1100)
    assert not list_blobs(server)


def test_failed_build_of_a_snapshot_leaves_no_bytes(world, monkeypatch):
    a = world.machine(1).start()
    server = a.exchange.server.snapshot_server
    first = a.publish_round(1)
    good = build_snapshot(a, 1e6)
    a.publish_round(2)
    third = a.publish_round(3)
    server.add_request(PendingRequest("c" * 64, {first.author: 2}, 1e9), 1e6)
    frozen, _ = server.copy_anchor(a.anchor, 1e6)
    damaged = third.fragments[-1].digest  # the last of the payloads that are subtracted
    a.ledger.blobs.path(damaged).write_bytes(b"damaged")
    assert server.build_snapshot(frozen, {first.author: 2}, 1e6) is None
    assert list_blobs(server) == set(blob_digests(good))
    monkeypatch.setattr(server.blobs, "store", fail_after(server.blobs.store, 2))
    with pytest.raises(OSError, match="no space"):
        server.build_snapshot(frozen, frozen.vector, 1e6)
    assert list_blobs(server) == set(blob_digests(good))


def fail_after(store, count: int):
    """Return a function that stores some blobs, until the disk is full."""
    calls = iter(range(count))

    def store_or_fail(data) -> str:
        if next(calls, None) is None:
            raise OSError("no space left on device")
        return store(data)

    return store_or_fail


def test_choose_majority_counts_each_volunteer_once():
    def manifest(letter: str) -> SnapshotManifest:
        return SnapshotManifest(vector={}, fragments=[letter * 64], heads="0" * 64)

    assert choose_majority([]) is None
    offers = [("v1", "a"), ("v1", "a"), ("v2", "b"), ("v3", "b")]
    answers = [(volunteer, manifest(letter)) for volunteer, letter in offers]
    chosen, supporters = choose_majority(answers)
    assert chosen.fragments == ["b" * 64] and supporters[1] == {"v2", "v3"}
    chosen, supporters = choose_majority(answers, own="v1")
    assert chosen.fragments == ["a" * 64], "this machine's own volunteer counts before all others"


def test_several_machines_join_at_once(world, caplog):
    caplog.set_level(logging.WARNING)
    a, b = (world.machine(n).start() for n in (1, 2))
    b.add_peers(a)
    a.publish_round(1)
    world.wait_for_agreement(a, b)
    late = [world.machine(n) for n in (3, 4, 5)]
    for machine in late:
        machine.add_peers(a, b)
    with stepping(a, b), ThreadPoolExecutor(3) as pool:
        fetched = list(pool.map(lambda machine: machine.exchange.fetch_snapshot(30.0), late))
    assert all(snapshot is not None and snapshot.confirmed for snapshot in fetched)


# ---- liars


def honest_machines(world, *numbers: int):
    """Return machines of as many volunteers that agree on a few updates."""
    machines = [world.machine(n).start() for n in numbers]
    for machine in machines[1:]:
        machine.add_peers(*machines[: machines.index(machine)])
    for seed, machine in enumerate(machines):
        machine.publish_round(seed)
    world.wait_for_agreement(*machines)
    return machines


def liars(world, *numbers: int):
    """Return machines of as many volunteers that serve other weights at a phantom author."""
    machines = [world.machine(n) for n in numbers]
    for machine in machines:
        poison(machine)
        machine.start()
    return machines


def step_for(seconds: float, *machines) -> None:
    with stepping(*machines):
        time.sleep(seconds)


def test_phantom_author_alone_overtakes_nobody(world, monkeypatch, caplog):
    monkeypatch.setattr(requests, "SNAPSHOT_DELAY_SECONDS", 0.5)
    (liar,) = liars(world, 9)
    a = world.machine(1).start()
    a.publish_round(1)
    before = a.anchor.digest()
    a.add_peers(liar)
    with stepping(a, liar):
        wait_until(lambda: a.exchange.waiting_reason is not None)
        time.sleep(1.0)
    assert not a.exchange.needs_resync and a.anchor.digest() == before
    assert a.exchange.waiting_reason == client_module.ONE_VOLUNTEER
    lines = [r for r in caplog.records if client_module.ONE_VOLUNTEER in r.getMessage()]
    assert len(lines) == 1, "it says once why it waits"


def test_one_liar_among_three_overtakes_nobody(world, monkeypatch):
    monkeypatch.setattr(requests, "SNAPSHOT_DELAY_SECONDS", 0.5)
    a, b, c = honest_machines(world, 1, 2, 3)
    (liar,) = liars(world, 9)
    for machine in (a, b, c):
        machine.add_peers(liar)
    step_for(3.0, a, b, c, liar)
    for machine in (a, b, c):
        assert not machine.exchange.needs_resync and not is_poisoned(machine)
        assert machine.exchange.waiting_reason is None
    assert world.wait_for_agreement(a, b, c)


def test_joiner_with_one_liar_among_three_gets_the_honest_weights(world):
    a, b, c = honest_machines(world, 1, 2, 3)
    (liar,) = liars(world, 9)
    joiner = world.machine(4)
    with stepping(a, b, c, liar):
        snapshot = join_peers(joiner, liar, a, b, c)
    assert snapshot.confirmed and not is_poisoned(joiner)
    world.wait_for_agreement(a, b, c, joiner)


def test_two_accounts_among_five_poison_neither_joiner_nor_member(world, monkeypatch):
    monkeypatch.setattr(requests, "SNAPSHOT_DELAY_SECONDS", 0.5)
    a, b, c = honest_machines(world, 1, 2, 3)
    liar, other_liar = liars(world, 8, 9)
    for machine in (a, b, c):
        machine.add_peers(liar, other_liar)
    joiner = world.machine(4)
    with stepping(a, b, c, liar, other_liar):
        snapshot = join_peers(joiner, liar, other_liar, a, b, c)
        time.sleep(2.0)
    assert snapshot.confirmed
    for machine in (a, b, c, joiner):
        assert not is_poisoned(machine) and not machine.exchange.needs_resync
    world.wait_for_agreement(a, b, c, joiner)


def test_keys_of_one_volunteer_count_as_one_liar(world):
    a, b = honest_machines(world, 1, 2)
    crowd = liars(world, 7, 8, 9)
    for machine in crowd:
        machine.exchange.renew_ticket(world.ticket(machine.identity.key, volunteer=9))
    joiner = world.machine(4)
    with stepping(a, b, *crowd):
        snapshot = join_peers(joiner, *crowd, a, b, timeout=20.0)
    assert snapshot is None or not is_poisoned(joiner)


def test_joiner_with_one_volunteer_replays_updates_and_trusts_no_weights(world):
    (a,) = honest_machines(world, 1)
    joiner = world.machine(2)
    with stepping(a):
        assert join_peers(joiner, a) is None
        assert joiner.exchange.waiting_reason is None
    world.wait_for_agreement(a, joiner)


def test_joiner_with_one_volunteer_waits_unless_told_to_trust(world, monkeypatch, caplog):
    monkeypatch.setattr(client_module, "MAX_REPLAYED_UPDATES", 0)
    (a,) = honest_machines(world, 1)
    joiner = world.machine(2)
    joiner.add_peers(a)
    with stepping(a):
        assert joiner.exchange.fetch_snapshot(3.0) is None
        assert "--trust-one" in joiner.exchange.waiting_reason
        snapshot = joiner.exchange.fetch_snapshot(10.0, trust=SnapshotTrust(True))
    assert snapshot is not None and not snapshot.confirmed
    assert joiner.exchange.waiting_reason is None


def test_joiner_with_one_volunteer_takes_what_the_site_confirms(world, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_REPLAYED_UPDATES", 0)
    (a,) = honest_machines(world, 1)
    a.exchange.remember_vector(a.anchor)
    listed = {"e" * 64: "e" * 64, a.anchor.vector_digest(): a.anchor.digest()}
    a.publish_round(8)
    joiner = world.machine(2)
    with stepping(a):
        snapshot = join_peers(joiner, a, confirmed=listed)
    assert snapshot.confirmed and joiner.exchange.waiting_reason is None
    world.wait_for_agreement(a, joiner)


@pytest.mark.parametrize("lie", ["other updates", "other weights", "unknown anchor"])
def test_single_lying_volunteer_does_not_pass_for_the_site(world, monkeypatch, lie):
    """Let the only volunteer serve other weights where the site lists an anchor."""
    monkeypatch.setattr(client_module, "MAX_REPLAYED_UPDATES", 0)
    (a,) = honest_machines(world, 1)
    listed = {a.anchor.vector_digest(): a.anchor.digest()}
    liar = a
    if lie == "other updates":
        (liar,) = liars(world, 9)
        server = liar.exchange.server.snapshot_server
        server.remember_vector(a.anchor.vector_digest(), liar.anchor.vector, 0)
    elif lie == "other weights":
        a.exchange.remember_vector(a.anchor)
        a.anchor.fragments[0][5] += 1
    joiner = world.machine(4)
    with stepping(liar):
        assert join_peers(joiner, liar, timeout=5.0, confirmed=listed) is None
    assert "only one volunteer" in joiner.exchange.waiting_reason
    assert not joiner.ledger.vector() and not is_poisoned(joiner)


def test_lying_mirror_and_an_honest_volunteer_give_no_weights(world, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_REPLAYED_UPDATES", 0)
    (a,) = honest_machines(world, 1)
    a.exchange.remember_vector(a.anchor)
    joiner = world.machine(4)
    joiner.add_peers(a)
    trust = SnapshotTrust(confirmed={a.anchor.vector_digest(): "f" * 64})
    with stepping(a):
        assert joiner.exchange.fetch_snapshot(5.0, trust=trust) is None
    assert not joiner.ledger.vector()


def test_second_machine_of_a_volunteer_believes_the_first(world):
    (a,) = honest_machines(world, 1)
    sibling = world.machine(2)
    sibling.stop()
    sibling.ticket = world.ticket(sibling.identity.key, volunteer=1)
    sibling.open()
    with stepping(a):
        snapshot = join_peers(sibling, a)
    assert snapshot is not None and snapshot.confirmed


def test_folder_with_updates_takes_no_weights_from_one_volunteer(world, monkeypatch):
    (liar,) = liars(world, 9)
    a = world.machine(1).start()
    a.publish_round(1)
    a.add_peers(liar)
    server = a.exchange.server
    with stepping(a, liar):
        wait_until(lambda: a.exchange.stats.peers == 1)
        joining = server.snapshot_client.join(4.0, SnapshotTrust(True))
        assert a.exchange.thread.run(joining, None) is None
    assert not is_poisoned(a)
