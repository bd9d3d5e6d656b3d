"""A clock that nobody sets."""

import time
from functools import lru_cache
from pathlib import Path


def steady() -> float:
    """Seconds since this machine started, sleep included where the system can tell."""
    return (
        time.clock_gettime(time.CLOCK_BOOTTIME)
        if hasattr(time, "CLOCK_BOOTTIME")
        else time.monotonic()
    )


@lru_cache(maxsize=1)
def boot() -> str:
    """Which start of this machine that counts from; "" where no system says so."""
    known = Path("/proc/sys/kernel/random/boot_id")
    return known.read_text().strip() if known.exists() else ""
