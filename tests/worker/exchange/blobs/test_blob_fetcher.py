"""Fetch blobs by digest from all peers that have them."""

import asyncio

from blake3 import blake3
from helpers.network.raw_peer import connect_raw_peer
from helpers.wait_for import wait_until, within

from barnraise.exchange.blobs import blob_fetcher
from barnraise.exchange.blobs.blob_fetcher import BlobDownload, BlobSource, WantedBlob
from barnraise.peering.limits.rate_limit import PIECE_BYTES
from barnraise.protocol.messages import BlobPart
from barnraise.training import prefetch


def test_fetch_blobs_finds_the_peer_that_has_the_blob(world):
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    data = bytes(range(256)) * 4000
    name = b.ledger.blobs.store(data)
    c.add_peers(a, b)
    wait_until(lambda: c.exchange.stats.peers == 2)
    assert c.exchange.fetch_blobs({name: None}, 20) and c.ledger.blobs.read(name) == data
    with within(20):
        assert not c.exchange.fetch_blobs({"0" * 64: None}, 1.0)


def test_fetch_of_many_files_uses_all_peers_at_once(world, monkeypatch):
    monkeypatch.setattr(prefetch, "BATCH_BLOBS", 5)  # eight files make two batches
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    files = [bytes([n]) * 300_000 for n in range(8)]
    for machine in (a, b):
        sizes = {machine.ledger.blobs.store(data): len(data) for data in files}
        machine.exchange.set_uplink_limit(1_000_000)
    c.add_peers(a, b)
    wait_until(lambda: c.exchange.stats.peers == 2)
    assert prefetch.fetch_all_blobs(c.exchange, c.ledger.blobs, sizes, "files", lambda: False)
    assert [c.ledger.blobs.read(digest) for digest in sizes] == files
    for machine in (a, b):
        assert machine.exchange.stats.bytes_sent > 2 * 300_000, "both uplinks are used"
    with within(20):
        assert not prefetch.fetch_all_blobs(
            c.exchange, c.ledger.blobs, {"0" * 64: None}, "files", lambda: True
        )


def test_fetch_continues_where_an_interrupted_one_ended(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    data = bytes(range(256)) * 4000
    name = a.ledger.blobs.store(data)
    b.ledger.blobs.append_piece(name, 0, data[:900_000], len(data))
    b.add_peers(a)
    assert b.exchange.fetch_blobs({name: len(data)}, 20) and b.ledger.blobs.read(name) == data
    assert b.exchange.stats.bytes_received < 200_000


def test_blob_of_another_size_than_known_is_refused_unstored(world, caplog):
    a, b = (world.machine(n).start() for n in (1, 2))
    name = a.ledger.blobs.store(bytes(5_000_000))
    b.add_peers(a)
    assert not b.exchange.fetch_blobs({name: 1000}, 2.0)
    assert b.ledger.blobs.partial_size(name) == 0
    assert "is not the one that was wanted" in caplog.text


def test_blob_is_requested_only_from_the_peers_that_are_said_to_have_it(world):
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    c.add_peers(a, b)
    wait_until(lambda: c.exchange.stats.peers == 2)
    for holder, other in ((a, b), (b, a)):
        data = bytes([holder.number]) * 100_000
        for machine in (a, b):
            name = machine.ledger.blobs.store(data)
        sent_before = other.exchange.stats.bytes_sent
        wanted = [WantedBlob(name, len(data), len(data))]
        fetch = c.exchange.server.fetcher.fetch(wanted, 20.0, holders={name: {holder.identity.key}})
        assert c.exchange.thread.run(fetch, False)
        assert other.exchange.stats.bytes_sent < sent_before + len(data) / 2


def test_false_blob_ends_the_link_and_is_fetched_from_another_peer(world, caplog):
    a, b = (world.machine(n).start() for n in (1, 2))
    data = bytes(range(256)) * 10
    name = blake3(data).hexdigest()
    fetcher = b.exchange.server.fetcher
    fetch = fetcher.fetch([WantedBlob(name, len(data), len(data))], 20.0)
    result = asyncio.run_coroutine_threadsafe(fetch, b.exchange.thread.loop)
    with connect_raw_peer(world, b) as send:
        wait_until(lambda: b.exchange.stats.peers == 1 and fetcher.wants(name))
        send(BlobPart(digest=name, offset=0, total=len(data)), bytes(len(data)))
        wait_until(lambda: b.exchange.stats.peers == 0)
    assert "are not what their digest says" in caplog.text
    assert not b.ledger.blobs.has(name) and not b.ledger.blobs.partial_size(name)
    a.ledger.blobs.store(data)
    b.add_peers(a)
    assert result.result(20) and b.ledger.blobs.read(name) == data


def test_fetch_that_ends_early_does_not_end_another_one_of_its_blob(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    data = bytes(range(256)) * 10
    name = blake3(data).hexdigest()
    fetcher = b.exchange.server.fetcher

    async def fetch_twice() -> list[bool]:
        wanted = [WantedBlob(name, len(data), len(data))]
        patient = asyncio.ensure_future(fetcher.fetch(wanted, 20.0))
        is_here_soon = await fetcher.fetch(wanted, 0.1)
        a.ledger.blobs.store(data)
        b.add_peers(a)
        return [is_here_soon, await patient]

    assert b.exchange.thread.run(fetch_twice(), []) == [False, True]


def test_source_that_sends_nothing_is_stalled_sooner_if_it_was_fast():
    fast, unproven = BlobSource(), BlobSource()
    for source in (fast, unproven):
        source.requested["a" * 64] = BlobDownload(WantedBlob("a" * 64, 1 << 30, 1 << 30), 0)
    fast.record_bytes(10 * PIECE_BYTES, now=1.0)
    unproven.progress_at = 1.0
    soon = 1.0 + blob_fetcher.MIN_STALL_SECONDS + 0.1
    assert fast.is_stalled(soon) and not unproven.is_stalled(soon)
    assert unproven.is_stalled(1.0 + blob_fetcher.STALL_SECONDS + 0.1)
    fast.requested.clear()
    assert not fast.is_stalled(soon), "it owes nothing"


def test_source_is_asked_for_as_much_as_its_uplink_sends_in_a_second():
    source = BlobSource()
    for number in range(blob_fetcher.MIN_AHEAD_BLOBS):
        assert source.has_room()
        source.requested[str(number)] = BlobDownload(WantedBlob(str(number), 1000, 1000), 0)
    assert not source.has_room(), "nothing is known of its uplink"
    source.record_bytes(3000, now=1.0)
    assert source.goodput == 3000.0 and source.requested_bytes == 2000 and source.has_room()


def test_peer_that_lacks_a_blob_is_not_asked_for_a_while():
    download = BlobDownload(WantedBlob("a" * 64, 1000, 1000), present=400)
    download.missing_until["peer"] = 10.0
    assert download.remaining == 600
    assert not download.may_come_from("peer", now=10.0) and download.may_come_from("peer", 10.1)
    download.holders = {"peer"}
    assert download.may_come_from("peer", 10.1) and not download.may_come_from("other", 10.1)
