"""Fetch blobs by digest from all peers that have them."""

from helpers.wait_for import wait_until, within

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
