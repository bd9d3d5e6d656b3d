"""Payloads of updates: false ones are refused, and small updates cost one visit to the disk."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from blake3 import blake3
from helpers.network.raw_peer import assert_refused, connect_raw_peer, limit_peers
from helpers.updates.forged_updates import (
    STRANGER,
    build_push,
    describe_payload,
    noise_payloads,
    send_payloads,
    send_update,
)
from helpers.wait_for import wait_until

from barnraise.exchange.gossip import requests
from barnraise.exchange.updates import payload_receiver
from barnraise.ledger import blob_store
from barnraise.peering.limits.service_limits import Rate, Service
from barnraise.peering.transports.framing import pack
from barnraise.protocol.messages import BlobPart, PeerState


def test_altered_payload_ends_the_connection_and_changes_nothing(world, caplog):
    a = world.machine(1).start()
    (first, _), *_ = noise_payloads(world)
    part = pack(describe_payload(first), b"\0" + first[1:])
    assert_refused(a, caplog, [build_push(world, STRANGER), part], "not what their digest says")


def test_payload_of_another_size_than_signed_is_refused(world, caplog):
    a = world.machine(1).start()
    name = blake3(noise_payloads(world)[0][0]).hexdigest()
    part = pack(BlobPart(digest=name, offset=0, total=1 << 40), b"x")
    assert_refused(a, caplog, [build_push(world, STRANGER), part], "its header says")


def test_peer_that_completes_a_poisoned_payload_is_not_blamed(world, monkeypatch):
    """A liar sends the first bytes of an update's payload, which an honest peer completes."""
    monkeypatch.setattr(requests, "RESPONSE_SECONDS", 0.5)
    monkeypatch.setattr(requests, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(requests, "UPDATE_RETRY_SECONDS", 2.0)
    b = world.machine(2).start()
    author = f"{STRANGER.key}.{'9' * 16}"
    data = noise_payloads(world)[0][0]
    name = blake3(data).hexdigest()
    with connect_raw_peer(world, b, number=8) as liar, connect_raw_peer(world, b) as honest:
        honest(build_push(world, STRANGER))
        wait_until(lambda: b.exchange.server.updates.incomplete)
        liar(BlobPart(digest=name, offset=0, total=len(data)), b"\0" * 10)
        wait_until(lambda: b.ledger.blobs.partial_size(name) == 10)
        honest(BlobPart(digest=name, offset=10, total=len(data)), data[10:])
        wait_until(lambda: not b.ledger.blobs.partial_size(name))

        def is_complete() -> bool:
            # The liar goes on, and the honest peer sends what it is asked for.
            liar(BlobPart(digest=name, offset=0, total=len(data)), b"\0" * 10)
            send_payloads(world, honest)
            time.sleep(0.1)
            return b.ledger.vector() == {author: 1}

        wait_until(is_complete)
        assert b.exchange.stats.peers == 2


def test_unrequested_pieces_are_ignored(world):
    a = world.machine(1).start()
    with connect_raw_peer(world, a) as send:
        send(BlobPart(digest="a" * 64, offset=0, total=10), b"0123456789")
        send(build_push(world, STRANGER))  # messages are handled in their order
        send_payloads(world, send)
        wait_until(a.ledger.vector)
        assert a.exchange.stats.peers == 1
        assert not a.ledger.blobs.has("a" * 64)
        assert not a.ledger.blobs.partial_size("a" * 64)


def test_flood_of_unwanted_payloads_ends_the_connection(world, monkeypatch, caplog):
    limit_peers(monkeypatch, Service.UNWANTED_BYTES, Rate(1000.0, 100_000.0))
    a = world.machine(1).start()
    part = pack(BlobPart(digest="a" * 64, offset=0, total=1 << 30), bytes(60_000))
    assert_refused(a, caplog, [part, part], "nothing here waits for")


@pytest.mark.parametrize("max_bytes", [payload_receiver.MAX_DECODED_BYTES, 0])
def test_decoded_units_stay_in_memory_up_to_the_limit(world, monkeypatch, max_bytes):
    monkeypatch.setattr(payload_receiver, "MAX_DECODED_BYTES", max_bytes)
    a, b = world.start_linked(1, 2)
    world.wait_for_agreement(a, b)
    a.publish_round(1)
    a.publish_round(2)
    wait_until(lambda: len(b.exchange.server.queue) == 2)
    for arrival in b.exchange.poll_updates():
        assert bool(arrival.units) == bool(max_bytes)
        without_units = replace(arrival, units=())
        for index in range(len(b.anchor.fragments)):
            arrival.decode(index).zero_()  # the caller may change what it received
            assert torch.equal(arrival.decode(index), without_units.decode(index))


def test_received_update_visits_the_disk_thread_once(world, monkeypatch):
    """Each visit wakes two threads, which costs more than most of what is done there."""
    a, b = world.start_agreed(1, 2)
    visits: list[str] = []
    submit = ThreadPoolExecutor.submit

    def submit_and_record(self, call, *arguments):
        def visit():
            if threading.current_thread().name.startswith("barnraise-disk"):
                visits.append(getattr(call, "func", call).__name__)
            return call(*arguments)

        return submit(self, visit)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_and_record)
    a.publish_round(2)
    world.wait_for_agreement(a, b)
    # What this machine thinks of the volunteers may be published meanwhile.
    assert [name for name in visits if name != "anchor_retractions"] == ["store"]


def test_update_that_two_peers_send_at_once_is_appended_once(world, monkeypatch, caplog):
    a, b = (world.machine(n).start() for n in (1, 2))
    update = a.publish_round(1)
    append_piece = blob_store.BlobStore.append_piece

    def append_slowly(self, *arguments):
        time.sleep(0.1)
        return append_piece(self, *arguments)

    monkeypatch.setattr(blob_store.BlobStore, "append_piece", append_slowly)
    with connect_raw_peer(world, b, 8) as send_one, connect_raw_peer(world, b, 9) as send_other:

        def send_both(message, payload=b"") -> None:
            for send in (send_one, send_other):
                send(message, payload)

        send_update(send_both, a.ledger, update)
        wait_until(lambda: b.ledger.vector() == {update.author: 1})
        send_other(PeerState(vector={}, rate=7.0))  # arrives after all parts
        links = b.exchange.server.gossip.links
        wait_until(lambda: 7.0 in [link.rate for link in links.values()])
        assert b.exchange.stats.peers == 2
    assert "an error of ours" not in caplog.text
    assert [received.header.seq for received in b.exchange.poll_updates()] == [1]


@pytest.mark.parametrize(
    ("choose_part", "method", "failing_call"),
    [
        (lambda ledger: ledger.retention, "expect_files", 1),
        (lambda ledger: ledger.blobs, "append_piece", 1),
        (lambda ledger: ledger, "append_all", 1),
        (lambda ledger: ledger, "append_all", 2),
    ],
)
def test_update_that_could_not_be_stored_is_received_again(
    world, monkeypatch, caplog, choose_part, method, failing_call
):
    """Let one call fail, as on a full disk. The link ends, and no update is lost."""
    monkeypatch.setattr(requests, "UPDATE_RETRY_SECONDS", 0.2)
    a, b = (world.machine(n).start() for n in (1, 2))
    part = choose_part(b.ledger)
    call = getattr(part, method)
    calls: list[str] = []

    def fail_once(*arguments):
        calls.append(method)
        if len(calls) == failing_call:
            raise OSError("no space left on device")
        return call(*arguments)

    monkeypatch.setattr(part, method, fail_once)
    b.add_peers(a)
    for seed in (1, 2, 3):
        a.publish_round(seed)
    world.wait_for_agreement(a, b)
    assert len(calls) > failing_call
    assert "no space left on device" in caplog.text
