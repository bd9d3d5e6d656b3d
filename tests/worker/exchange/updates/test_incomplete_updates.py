"""Updates that wait for their payloads occupy a bounded part of the disk, and not for ever."""

import time

from blake3 import blake3
from helpers.network.raw_peer import connect_raw_peer
from helpers.updates.forged_updates import STRANGER, build_push, noise_payloads, send_payloads
from helpers.wait_for import wait_until

from barnraise.exchange.updates import (
    incomplete_updates,
    payload_receiver,
    update_receiver,
)
from barnraise.protocol.messages import BlobPart, Update


def test_stale_headers_make_room_for_other_authors(world, monkeypatch):
    monkeypatch.setattr(incomplete_updates, "MAX_INCOMPLETE_OF_VOLUNTEER", 3)
    monkeypatch.setattr(incomplete_updates, "STALE_SECONDS", 1.0)
    a = world.machine(1).start()
    updates = a.exchange.server.updates
    with connect_raw_peer(world, a) as send:
        for life in range(20):
            send(build_push(world, STRANGER, incarnation=f"{life:016x}"))
        data, _ = noise_payloads(world)[0]
        name = blake3(data).hexdigest()
        send(BlobPart(digest=name, offset=0, total=len(data)), data[:-1])
        wait_until(lambda: a.ledger.blobs.partial_size(name))
        assert len(updates.incomplete) == 3
        b = world.machine(2).start().add_peers(a)
        b.publish_round(1)
        world.wait_for_agreement(a, b)
        time.sleep(1.1)
        for life in range(20, 23):
            send(build_push(world, STRANGER, incarnation=f"{life:016x}"))
        wait_until(lambda: {author[-2:] for author, _ in updates.incomplete} == {"14", "15", "16"})
        updates.ban_author(f"{STRANGER.key}.{20:016x}", 1, "the test says so")
        assert a.ledger.blobs.partial_size(name), "other updates still need it"
        for life in (21, 22):
            updates.ban_author(f"{STRANGER.key}.{life:016x}", 1, "the test says so")
        assert not a.ledger.blobs.partial_size(name), "pieces that no update needs are deleted"


def test_payloads_of_updates_that_never_complete_do_not_stay(world, monkeypatch):
    """A peer sends all payloads of an update but one; they go after a time, or a restart."""
    monkeypatch.setattr(update_receiver, "EXPIRY_INTERVAL", 0.2)
    monkeypatch.setattr(payload_receiver, "MAX_BUFFERED_UPDATE", 0)  # as for larger models
    a = world.machine(1).start()
    blobs = a.ledger.blobs
    payloads = [data for data, _ in noise_payloads(world)]
    names = [blake3(data).hexdigest() for data in payloads]

    def send_half(send, life):
        send(build_push(world, STRANGER, incarnation=f"{life:016x}"))
        for name, data in zip(names[1:], payloads[1:], strict=True):
            send(BlobPart(digest=name, offset=0, total=len(data)), data)
        send(BlobPart(digest=names[0], offset=0, total=len(payloads[0])), payloads[0][:100])

    with connect_raw_peer(world, a) as send:
        send_half(send, 1)
        wait_until(lambda: blobs.partial_bytes() == 100 and all(map(blobs.has, names[1:])))
        with monkeypatch.context() as later:
            later.setattr(incomplete_updates, "EXPIRY_SECONDS", -1e6)
            wait_until(lambda: not a.exchange.server.updates.incomplete)
            wait_until(lambda: not any(map(blobs.has, names)) and not blobs.partial_bytes())
        send_half(send, 2)
        wait_until(lambda: all(map(blobs.has, names[1:])))
        a.stop()  # while they wait
    a.open()
    assert not any(map(a.ledger.blobs.has, names)), "the next start deletes them"
    a.exchange.open()


def test_complete_update_that_waits_for_its_time_does_not_expire(world, monkeypatch, caplog):
    monkeypatch.setattr(update_receiver, "EXPIRY_INTERVAL", 0.1)
    monkeypatch.setattr(update_receiver, "MAX_WAIT", 0.1)
    a, now = world.start_machine_with_clock(1)
    updates = a.exchange.server.updates
    author = f"{STRANGER.key}.{'9' * 16}"
    incomplete = build_push(world, STRANGER, incarnation="8" * 16)
    parts = Update.model_validate_json(incomplete.header.body).fragments
    lost = [part.model_copy(update={"digest": f"{n:064x}"}) for n, part in enumerate(parts)]
    with connect_raw_peer(world, a) as send:
        send(build_push(world, STRANGER, time_ms=int(1000 * now[0]) + 100_000))
        send_payloads(world, send)
        wait_until(lambda: "states a time that is" in caplog.text)
        send(build_push(world, STRANGER, incarnation="8" * 16, fragments=lost))
        wait_until(lambda: len(updates.incomplete) == 2)
        monkeypatch.setattr(incomplete_updates, "EXPIRY_SECONDS", -1e6)
        wait_until(lambda: len(updates.incomplete) < 2)
        assert updates.incomplete == [(author, 1)], "its bytes are all here"
        now[0] += 200.0
        wait_until(lambda: a.ledger.vector() == {author: 1})
