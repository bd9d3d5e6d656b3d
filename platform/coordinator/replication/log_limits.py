"""Bound what a mirror's logs add to this site in a day.

A mirror of the list may write any event; one that writes without end would fill every disk.
"""

from collections.abc import Sequence

from barnraise.protocol.messages import Signed
from coordinator.lib.period_counters import count_in_period

DAY = 86400
# A site of ten thousand machines writes some 50 MB a day.
MAX_DAILY_BYTES = 1 << 30


def admit(events: Sequence[Signed]) -> bool:
    """Count events (at least one) that one mirror signed; return whether it may add them today."""
    size = sum(len(event.body) for event in events)
    return count_in_period(f"log bytes:{events[0].key}", DAY, size) <= MAX_DAILY_BYTES
