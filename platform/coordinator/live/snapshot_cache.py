"""Share encoded snapshots between requests: hundreds of pages may open at once.

While a process broadcasts the run, every change has a number and the broadcaster stores what a
snapshot needs. A snapshot is then current until the next number, and a run of thousands of machines
is read once a second, by one process. While nobody broadcasts, every snapshot is built from the
database.
"""

import json
import threading
from collections import defaultdict
from typing import Any, cast

from coordinator.lib.valkey import valkey_client
from coordinator.live.run_snapshot import build_snapshot, load_snapshot, lock_key, sequence_key
from coordinator.runs.models import Run

MAX_RUNS = 16  # whose last snapshot a process caches


class SnapshotCache:
    """Cache the last snapshot of each run as (number, JSON).

    One thread encodes a snapshot, and requests that arrive in the meantime wait for its result.
    """

    def __init__(self) -> None:
        self._snapshots: dict[str, tuple[int, bytes]] = {}
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def get(self, run: Run) -> bytes:
        """Return the run's current snapshot as JSON."""
        name = str(run.pk)
        keys = valkey_client().mget(sequence_key(name), lock_key(name))
        number, broadcaster = cast(list[str | None], keys)
        if not broadcaster:
            return encode_json(build_snapshot(run))
        with self._locks[name]:
            cached_number, encoded = self._snapshots.get(name, (-1, b""))
            if cached_number < int(number or 0):
                snapshot = load_snapshot(run) or build_snapshot(run)
                encoded = encode_json(snapshot)
                self._snapshots.pop(name, None)
                self._snapshots[name] = snapshot["seq"], encoded
                while len(self._snapshots) > MAX_RUNS:
                    oldest = next(iter(self._snapshots))
                    self._snapshots.pop(oldest)
                    self._locks.pop(oldest, None)
            return encoded


def encode_json(message: dict[str, Any]) -> bytes:
    """Encode a message as compact JSON."""
    return json.dumps(message, separators=(",", ":")).encode()


snapshot_cache = SnapshotCache()
