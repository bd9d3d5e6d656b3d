"""Leave a mirror alone that kept this site waiting, so that no mirror holds up a site's tasks.

Tasks run one after the other. A mirror that answers each request just in time would otherwise take
all of their time: of what follows it gets as long as it wasted, and of a long wait a tenth.
"""

import math

from django.core.cache import cache

from coordinator.replication.client import READ_SECONDS

FREE_SECONDS = 1.0  # that a mirror far away, or a busy one, may waste each time
LONG_SECONDS = 5.0
LONG_REST = 9.0  # times the seconds that a long wait wasted


def rest_seconds(wasted: float) -> float:
    """Return for how long a mirror is left alone that wasted so many seconds. Pure."""
    if wasted < FREE_SECONDS:
        return 0.0
    return wasted * (LONG_REST if wasted >= LONG_SECONDS else 1.0)


def record_wait(key: str, wasted: float, unreachable: bool = False) -> None:
    """Record how many seconds the mirror with this key has just wasted.

    One that cannot be reached costs the time until that is clear, and is pulled as soon as it is
    back.
    """
    seconds = rest_seconds(wasted - READ_SECONDS if unreachable else wasted)
    if seconds:
        cache.set(_cache_key(key), 1, math.ceil(seconds))


def is_resting(key: str) -> bool:
    """Return whether the mirror with this key is left alone for now."""
    return cache.get(_cache_key(key)) is not None


def _cache_key(key: str) -> str:
    return f"replication:rest:{key}"
