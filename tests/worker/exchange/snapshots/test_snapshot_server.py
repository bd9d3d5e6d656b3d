"""Snapshots of the anchor: who is served which, and how long its bytes stay on the disk."""

import asyncio
import time

import hypothesis.strategies as st
import pytest
from helpers.network.raw_peer import connect_raw_peer
from helpers.wait_for import join_peers, stepping, wait_until
from hypothesis import given

from barnraise.exchange.snapshots import snapshot_server
from barnraise.exchange.snapshots.snapshot_server import (
    PendingRequest,
    RecentSnapshot,
    SnapshotServer,
    VectorHistory,
    blob_digests,
    choose_kept,
)
from barnraise.ledger.anchor import fragment_to_bytes
from barnraise.peering.limits.service_limits import SERVICE_LIMITS, Service
from barnraise.protocol.messages import PeerState, SnapshotManifest, SnapshotRequest


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
            vector = {a.exchange.author.name: seq}
            server.add_request(PendingRequest(key * 64, vector, now + 30, "flooder"), now)
            copies += server.copy_anchor(a.anchor, now) is not None
    assert copies <= SERVICE_LIMITS[Service.SNAPSHOTS]["volunteer"].burst
    server.add_request(PendingRequest("d" * 64, None, now + 30, "honest"), now)
    frozen, pending = server.copy_anchor(a.anchor, now)
    assert frozen.vector == a.anchor.vector and [request.peer[0] for request in pending] == ["d"]


def test_request_ahead_of_the_anchor_waits_until_it_expires(world):
    a = world.machine(1).start()
    server, now = SnapshotServer(a.ledger, {}, asyncio.to_thread), time.monotonic()
    server.add_request(PendingRequest("b" * 64, {a.exchange.author.name: 1}, now + 30), now)
    assert server.copy_anchor(a.anchor, now) is None
    a.publish_round(1)
    assert server.copy_anchor(a.anchor, now) is not None
    server.add_request(PendingRequest("b" * 64, {a.exchange.author.name: 9}, now + 30), now)
    assert server.copy_anchor(a.anchor, now + 31) is None and not server.pending_requests


def test_snapshot_before_the_ledgers_base_is_not_served(world):
    a, b = world.start_linked(1, 2)
    for seed in range(3):
        a.publish_round(seed)
    world.wait_for_agreement(a, b)
    with stepping(a, b):
        join_peers(world.machine(3), a, b, trust_one=True)
    c = world.machines[2]
    server, now = c.exchange.server.snapshot_server, time.monotonic()
    server.add_request(PendingRequest("d" * 64, {a.exchange.author.name: 1}, now + 30), now)
    frozen, _ = server.copy_anchor(c.anchor, now)
    assert server.build_snapshot(frozen, {a.exchange.author.name: 1}, now) is None


def build_snapshot(machine, now: float) -> SnapshotManifest | None:
    """Build a snapshot of a machine's anchor as it is now, for a stranger."""
    server = machine.exchange.server.snapshot_server
    server.add_request(PendingRequest("b" * 64, dict(machine.anchor.vector), 1e9), now)
    frozen, _ = server.copy_anchor(machine.anchor, now)
    return server.build_snapshot(frozen, frozen.vector, now)


def list_blobs(server: SnapshotServer) -> set[str]:
    """Return the digests of all blobs on a snapshot server's disk."""
    return {path.name for path in server.blobs.folder.glob("*/*")}


def test_bytes_of_all_but_the_newest_snapshots_are_deleted(world):
    a = world.machine(1).start()
    snapshots: list[SnapshotManifest] = []
    for seed in range(snapshot_server.MAX_SNAPSHOTS + 2):
        a.publish_round(seed)
        snapshots.append(build_snapshot(a, 1e6))
    kept = snapshots[-snapshot_server.MAX_SNAPSHOTS :]
    needed = {blob for snapshot in kept for blob in blob_digests(snapshot)}
    assert list_blobs(a.exchange.server.snapshot_server) == needed


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


def test_snapshot_at_an_earlier_vector_has_the_bytes_of_that_time(world):
    a = world.machine(1).start()
    a.publish_round(1)
    earlier = [bytes(fragment_to_bytes(fragment)) for fragment in a.anchor.fragments]
    a.publish_round(2)
    server = a.exchange.server.snapshot_server
    server.add_request(PendingRequest("b" * 64, {a.exchange.author.name: 1}, 1e9), 1e6)
    frozen, _ = server.copy_anchor(a.anchor, 1e6)
    manifest = server.build_snapshot(frozen, {a.exchange.author.name: 1}, 1e6)
    assert [server.blobs.read(digest) for digest in manifest.fragments] == earlier


def test_recent_snapshot_answers_until_it_is_too_old_or_a_verdict_comes(world):
    a = world.machine(1).start()
    server = a.exchange.server.snapshot_server
    a.publish_round(1)
    manifest = build_snapshot(a, 1e6)
    request = PendingRequest("c" * 64, None, 1e9)
    assert server.add_request(request, 1e6 + snapshot_server.REUSE_SECONDS - 1) == manifest
    assert server.add_request(request, 1e6 + snapshot_server.REUSE_SECONDS) is None
    exact = PendingRequest("c" * 64, dict(manifest.vector), 1e9)
    assert server.add_request(exact, 1e6 + snapshot_server.REUSE_SECONDS) == manifest
    a.apply_verdict(world.sign_verdict({"a" * 64 + "." + "0" * 16: 0}))
    assert server.add_request(exact, 1e6) is None


def test_requests_beyond_the_limit_are_dropped(world):
    server = world.machine(1).exchange.server.snapshot_server
    for number in range(snapshot_server.MAX_PENDING_REQUESTS + 5):
        server.add_request(PendingRequest(f"{number:064x}", None, 1e9), 1e6)
    assert len(server.pending_requests) == snapshot_server.MAX_PENDING_REQUESTS


def test_request_for_confirmed_vectors_waits_only_if_one_is_known(world):
    a = world.machine(1).start()
    server = a.exchange.server.snapshot_server
    server.remember_vector("a" * 64, {}, milestone=1)
    with connect_raw_peer(world, a, 8) as send, connect_raw_peer(world, a, 9) as send_known:
        send(SnapshotRequest(confirmed=["b" * 64]))
        send(PeerState(vector={}, rate=7.0))  # messages are handled in their order
        send_known(SnapshotRequest(confirmed=["b" * 64, "a" * 64]))
        links = a.exchange.server.gossip.links
        wait_until(lambda: 7.0 in [link.rate for link in links.values()])
        wait_until(lambda: server.pending_requests)
        (request,) = server.pending_requests
        assert request.vector == {} and request.volunteer == f"{9:064x}"


@given(st.lists(st.floats(0.0, 2000.0), max_size=12), st.integers(1, 5))
def test_choose_kept_keeps_the_newest_of_those_in_use(used_at, limit):
    now = 2000.0
    manifest = SnapshotManifest(vector={}, fragments=[], heads="a" * 64)
    recent = [RecentSnapshot(manifest, float(n), used) for n, used in enumerate(used_at)]
    kept = choose_kept(recent, now, limit)
    in_use = [each for each in recent if each.used_at + snapshot_server.KEEP_SECONDS > now]
    assert len(kept) == min(limit, len(in_use))
    assert kept == in_use[len(in_use) - len(kept) :]


def test_vector_history_keeps_the_first_vectors_of_the_newest_milestones(monkeypatch):
    history = VectorHistory()
    for milestone in range(snapshot_server.MAX_MILESTONES + 1):
        for number in range(snapshot_server.MAX_VECTORS + 1):
            history.add(f"{milestone}.{number}", {"author": 100 * milestone + number}, milestone)
    last = snapshot_server.MAX_VECTORS - 1
    assert history.find_first(["0.0"]) is None, "the oldest milestone"
    assert history.find_first([f"1.{last + 1}"]) is None, "one vector more than are remembered"
    assert history.find_first(["0.0", f"1.{last}", "2.0"]) == {"author": 100 + last}
    monkeypatch.setattr(snapshot_server, "MAX_ENTRIES", 1)
    history.add("100.0", {"one": 1, "other": 1}, 100)
    assert history.find_first(["2.0"]) is None, "many authors take the room of many vectors"
    assert history.find_first(["100.0"]) == {"one": 1, "other": 1}, "the newest one stays"
