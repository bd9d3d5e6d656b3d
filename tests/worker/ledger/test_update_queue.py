"""Test the queue between the exchange's event loop and the training loop, from both threads."""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from helpers.updates.headers import build_update

from barnraise.ledger.anchor import Retraction
from barnraise.ledger.blob_store import BlobStore
from barnraise.ledger.codec import encode
from barnraise.ledger.update_queue import ReceivedUpdate, UpdateQueue
from barnraise.protocol.messages import FragmentUpdate

CHANGES = 20_000


@pytest.fixture
def frequent_switches():
    """Let threads take turns as often as the interpreter can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_switches")
def test_queue_filled_and_drained_at_once_loses_and_repeats_nothing():
    queue = UpdateQueue((4,), None, lambda digest, size: False)
    units = (torch.zeros(4, dtype=torch.int32),)
    drained: list[int] = []
    is_filled = threading.Event()

    def drain() -> None:
        while not is_filled.is_set() or len(queue):
            drained.extend(received.header.seq for received in queue.drain())

    training_loop = threading.Thread(target=drain)
    training_loop.start()
    sizes = set()
    try:
        for seq in range(CHANGES):
            queue.append(SimpleNamespace(seq=seq), units)
            sizes.add(queue.decoded_bytes % 16)
    finally:
        is_filled.set()
        training_loop.join()
    assert drained == list(range(CHANGES))
    assert sizes == {0} and queue.decoded_bytes == 0


@pytest.mark.parametrize("multiplier", [-1, 0, 1])
def test_encoded_parts_are_those_that_are_decoded(multiplier, tmp_path):
    payload, units = encode(torch.arange(-50, 50, dtype=torch.int32) * 1000)
    blobs = BlobStore(tmp_path)
    digest = blobs.store(payload)
    part = FragmentUpdate(digest=digest, size=len(payload), sketch="0" * 16)
    empty = FragmentUpdate(digest="0" * 64, size=0, sketch="0" * 16)
    update = build_update("a" * 64, 1, fragments=[part, empty])
    header = update if multiplier == 1 else Retraction(update, multiplier, single=True)
    received = ReceivedUpdate(header, (100, 100), blobs)
    assert received.read_encoded(1) is None
    if multiplier == 0:
        assert received.read_encoded(0) is None and received.decode(0) is None
    else:
        assert received.read_encoded(0) == (payload, multiplier)
        assert torch.equal(received.decode(0), multiplier * units)
