"""Who is blamed for false bytes of a blob, whose pieces several peers may send."""

from barnraise.exchange.blobs.piece_sources import PieceSources

BLOB = "b" * 64


def test_peer_that_sent_all_of_a_false_blob_is_blamed():
    pieces = PieceSources()
    pieces.add(BLOB, "liar", 0)
    pieces.add(BLOB, "liar", 100)
    assert pieces.on_corrupt(BLOB, "liar")
    assert pieces.accepts(BLOB, "honest"), "others may send it at once"


def test_nobody_is_blamed_for_bytes_from_before_this_process():
    pieces = PieceSources()
    pieces.add(BLOB, "honest", 100)
    assert not pieces.on_corrupt(BLOB, "honest")


def test_contested_blob_counts_only_from_the_peer_that_is_asked():
    pieces = PieceSources()
    pieces.add(BLOB, "liar", 0)
    pieces.add(BLOB, "honest", 10)
    attempt = pieces.attempt(BLOB)
    assert not pieces.on_corrupt(BLOB, "honest")
    assert pieces.attempt(BLOB) != attempt, "a piece that waits for the disk would count again"
    assert not pieces.accepts(BLOB, "liar") and not pieces.accepts(BLOB, "honest")
    assert pieces.request_from(BLOB, "liar"), "it begins again"
    pieces.add(BLOB, "liar", 0)
    assert pieces.accepts(BLOB, "liar") and not pieces.accepts(BLOB, "honest")
    assert pieces.request_from(BLOB, "honest"), "what the liar sent is discarded"
    assert not pieces.request_from(BLOB, "honest"), "the rest of it is requested"
    pieces.add(BLOB, "honest", 0)
    assert pieces.on_corrupt(BLOB, "honest"), "from now on a false blob has one source"
    pieces.forget(BLOB)
    assert pieces.accepts(BLOB, "liar") and not pieces.request_from(BLOB, "liar")
