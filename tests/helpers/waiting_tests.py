"""Tests that never end, in processes with servers: tests/test_ended_runs.py ends their run."""

import json
import os
import time
from pathlib import Path

import pytest


@pytest.mark.parametrize("number", [1, 2])
def test_wait_with_servers(number, state):
    started = Path(os.environ["BARNRAISE_STARTED"], f"{number}.json")
    unfinished = started.with_suffix(".new")
    unfinished.write_text(json.dumps([os.getpid(), str(state)]))
    unfinished.replace(started)
    while True:
        time.sleep(1)
