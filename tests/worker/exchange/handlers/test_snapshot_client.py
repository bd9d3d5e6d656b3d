"""Joining late: snapshots of the anchor are requested, compared, fetched and continued from."""

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.wait_for import join_peers, stepping

from barnraise.errors import MessageError
from barnraise.exchange.handlers import snapshot_client as client_module
from barnraise.exchange.handlers import snapshot_server, update_sender
from barnraise.exchange.handlers.snapshot_client import choose_majority, read_heads
from barnraise.exchange.handlers.snapshot_server import PendingRequest, SnapshotServer
from barnraise.exchange.ledger.anchor import fragment_to_bytes
from barnraise.protocol.messages import SnapshotManifest

RUN = "01890000-0000-7000-8000-000000000001"


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
        snapshot = join_peers(
            d, c, timeout=9.0
        )  # a and b are connected, but their loops take no steps
    assert snapshot is not None and not snapshot.confirmed, "one volunteer alone confirms nothing"
    world.wait_for_agreement(c, d)


def test_snapshot_of_one_peer_is_logged_as_unconfirmed(world, caplog):
    a = world.machine(1).start()
    a.publish_round(1)
    with stepping(a):
        snapshot = join_peers(world.machine(2), a)
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
        snapshot = join_peers(world.machine(3), a, b)
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


def test_two_disagreeing_peers_leave_the_snapshot_unconfirmed(world, caplog):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.add_peers(a)
    a.publish_round(1)
    world.wait_for_agreement(a, b)
    b.anchor.fragments[0][5] += 1  # bit-rot
    with stepping(a, b):
        snapshot = join_peers(world.machine(3), a, b)
    assert not snapshot.confirmed
    assert any("disagree" in record.getMessage() for record in caplog.records)


def test_fetch_snapshot_at_the_runs_start_or_alone_returns_none(world):
    a, b = world.machine(1).start(), world.machine(2)
    b.add_peers(a)
    started_at = time.monotonic()
    assert b.exchange.fetch_snapshot(20.0) is None
    assert time.monotonic() - started_at < 10
    alone = world.machine(3)
    assert alone.exchange.fetch_snapshot(0.5) is None


def test_fetch_snapshot_from_a_silent_peer_ends_in_time(world):
    a = world.machine(1).start()  # connected, but its loop takes no steps
    a.publish_round(1)
    late = world.machine(2)
    late.add_peers(a)
    started_at = time.monotonic()
    assert late.exchange.fetch_snapshot(2.0) is None
    assert time.monotonic() - started_at < 5


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


def test_large_slow_fragment_arrives_beyond_the_timeout(world, monkeypatch):
    a = world.machine(1).start()
    a.publish_round(1)
    largest = max(4 * fragment.numel() for fragment in a.anchor.fragments)
    monkeypatch.setattr(client_module, "MAX_HEADS_BYTES", largest - 1)
    monkeypatch.setattr(client_module, "MIN_FETCH_SECONDS", 0.5)
    monkeypatch.setattr(client_module, "MIN_FETCH_RATE", 1000)
    monkeypatch.setattr(update_sender, "PIECE_BYTES", 1000)
    world.network.bandwidth = (
        largest / 3
    )  # the transfer takes three seconds, and the join waits for two
    with stepping(a):
        assert join_peers(world.machine(2), a, timeout=2.0) is not None


def test_fetch_snapshot_returns_soon_after_should_stop(world):
    a, late = world.machine(1).start(), world.machine(2)
    a.publish_round(1)
    late.add_peers(a)  # its loop never answers
    leaving = threading.Event()
    threading.Timer(0.5, leaving.set).start()
    started_at = time.monotonic()
    assert late.exchange.fetch_snapshot(30.0, leaving.is_set) is None
    assert time.monotonic() - started_at < 3


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


def test_choose_majority_counts_each_volunteer_once():
    def manifest(letter: str) -> SnapshotManifest:
        return SnapshotManifest(vector={}, fragments=[letter * 64], heads="0" * 64)

    assert choose_majority([]) is None
    offers = [("v1", "a"), ("v1", "a"), ("v2", "b"), ("v3", "b")]
    chosen, volunteers = choose_majority(
        [(volunteer, manifest(letter)) for volunteer, letter in offers]
    )
    assert chosen.fragments == ["b" * 64] and volunteers == 2


def test_read_heads_refuses_unsigned_or_other_heads(world):
    a = world.machine(1).start()
    author = a.exchange.author
    for seed in range(2):
        a.publish_round(seed)
    newest, older = a.ledger.header(author, 2), a.ledger.header(author, 1)

    def as_json(*headers) -> bytes:
        return ("[" + ",".join(header.model_dump_json() for header in headers) + "]").encode()

    assert read_heads(as_json(newest), RUN, {author: 2})[0][1].seq == 2
    for data, run, vector in [
        (b"nonsense", RUN, {author: 2}),
        (as_json(older), RUN, {author: 2}),
        (as_json(newest, older), RUN, {author: 2}),
        (as_json(), RUN, {author: 2}),
        (as_json(newest), "01890000-0000-7000-8000-00000000000f", {author: 2}),
        (as_json(newest.model_copy(update={"signature": "0" * 128})), RUN, {author: 2}),
    ]:
        with pytest.raises(MessageError):
            read_heads(data, run, vector)


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
