"""Test the queue between the exchange's event loop and the training loop, from both threads."""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from barnraise.ledger.update_queue import UpdateQueue

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
