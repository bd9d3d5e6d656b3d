"""Fixtures of the engine's tests on a fake card."""

import pytest
import torch
from helpers.cuda.cuda_stub import card_process


@pytest.fixture(autouse=True)
def restored_threads():
    """Restore torch's number of threads after each test."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def card():
    """Return a function that calls another one in a process where fake cards work."""
    with card_process() as process:
        yield lambda call, *args, **options: process.submit(call, *args, **options).result()
