"""Read a clock that nobody sets."""

import time
from functools import lru_cache
from pathlib import Path


def uptime() -> float:
    """Return seconds since this machine booted, including sleep if the system counts it."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the id of the current boot, which `uptime` counts from; "" if the system has none."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
