"""Snapshots of the anchor: who is served which, and how long its bytes stay on the disk."""

import asyncio
import time

import pytest
from helpers.wait_for import join_peers, stepping

from barnraise.exchange.snapshots import snapshot_server
from barnraise.exchange.snapshots.snapshot_server import (
    PendingRequest,
    SnapshotServer,
    blob_digests,
)
from barnraise.protocol.messages import SnapshotManifest


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
    assert copies <= snapshot_server.BUILDS_OF_VOLUNTEER[1]
    server.add_request(PendingRequest("d" * 64, None, now + 30, "honest"), now)
    frozen, pending = server.copy_anchor(a.anchor, now)
    assert frozen.vector == a.anchor.vector and [request.peer[0] for request in pending] == ["d"]


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
