"""What a peer is sent of the blobs that it requests."""

import pytest
from helpers.wait_for import wait_until

from barnraise.ledger import blob_store


def test_blob_that_a_crash_left_whole_without_its_name_is_finished(world, monkeypatch):
    """All its bytes are here, so that no byte is left to request."""
    a, b = (world.machine(n).start() for n in (1, 2))
    data = bytes(range(256)) * 1000
    name = a.ledger.blobs.store(data)

    def crash(*arguments: object) -> None:
        raise OSError("the power failed")

    with monkeypatch.context() as patch:
        patch.setattr(blob_store, "move_into_place", crash)
        b.ledger.blobs.append_piece(name, 0, data[:1000], len(data))
        with pytest.raises(OSError, match="power failed"):
            b.ledger.blobs.append_piece(name, 1000, data[1000:], len(data))
    assert b.ledger.blobs.partial_size(name) == len(data) and not b.ledger.blobs.has(name)
    b.add_peers(a)
    wait_until(lambda: b.exchange.stats.peers == 1)
    assert b.exchange.fetch_blobs({name: len(data)}, 20)
    assert b.ledger.blobs.read_verified(name) == data
