"""Snapshots as they are sent, shared by all that ask between two deltas: pages open by the hundred at times.

While somebody speaks for the run every change of it has a number, so that a snapshot is as good as new until the next
one, and who speaks leaves what a snapshot needs: a run of thousands is looked at once a second, by one process. While
nobody does, each is made afresh.
"""

import json
import threading
from collections import defaultdict

from coordinator.lib.valkey import valkey_client
from coordinator.live.run_snapshot import build_snapshot, load_snapshot, lock_key, sequence_key
from coordinator.runs.models import Run

MOST = 16  # runs of which a process keeps the last one


class SnapshotCache:
    """Run → (number, JSON). One thread makes it, and those that came meanwhile take the same."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, bytes]] = {}
        self._making: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def get(self, run: Run) -> bytes:
        name = str(run.pk)
        number, spoken_for = valkey_client().mget(sequence_key(name), lock_key(name))
        if not spoken_for:
            return encode_json(build_snapshot(run))
        with self._making[name]:
            made, whole = self._kept.get(name, (-1, b""))
            if made < int(number or 0):
                found = load_snapshot(run) or build_snapshot(run)
                made, whole = found["seq"], encode_json(found)
                self._kept.pop(name, None)
                self._kept[name] = made, whole
                while len(self._kept) > MOST:
                    oldest = next(iter(self._kept))
                    self._kept.pop(oldest)
                    self._making.pop(oldest, None)
            return whole


def encode_json(found: dict) -> bytes:
    return json.dumps(found, separators=(",", ":")).encode()


snapshot_cache = SnapshotCache()
