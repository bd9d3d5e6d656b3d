"""Store heartbeats of the background parts, as old as a test needs them."""

import time

from coordinator.lib import heartbeats

AHEAD_SECONDS = 3600.0  # of heartbeats that stay current however slow the test is


def set_heartbeats(valkey, **ages: float) -> None:
    """Store heartbeats of so many seconds ago, and for other parts some that stay current."""
    heartbeats.forget()
    now = time.time()
    for part in heartbeats.Part:
        valkey.hset(heartbeats.KEY, part.value, now - ages.get(part.value, -AHEAD_SECONDS))
