"""Count seconds in proportion to the share of the machine that other programs leave to a drill.

A limit of so many seconds is right on a machine that does nothing else. If another program uses one
of two cores, everything that a drill waits for takes twice as long, and a limit on this clock lasts
twice as long too. On a machine without other work the clock is an ordinary one.
"""

import os
import threading
import time
from collections.abc import Callable

import psutil

MIN_SAMPLE_SECONDS = 0.5  # between two measurements
MIN_SHARE = 0.05  # Even if others use all cores, the scheduler leaves a drill something.


class AvailableClock:
    """A monotonic clock that runs slower while other programs use the machine.

    Args:
        own_cpu: Returns the CPU seconds that the drill's own processes have used so far.
    """

    def __init__(self, own_cpu: Callable[[], float]) -> None:
        self._own_cpu = own_cpu
        self._lock = threading.Lock()
        self._sampled_at = time.monotonic()
        self._busy = measure_busy_seconds()
        self._own = own_cpu()
        self._share = 1.0
        self._counted = 0.0  # at the last sample
        self._returned = 0.0  # the clock never goes back

    @property
    def share(self) -> float:
        """Return the share of the machine that others left between the last two samples."""
        return self._share

    def now(self) -> float:
        """Return the seconds counted so far."""
        with self._lock:
            elapsed = time.monotonic() - self._sampled_at
            if elapsed >= MIN_SAMPLE_SECONDS:
                self._sample()
                elapsed = time.monotonic() - self._sampled_at
            self._returned = max(self._returned, self._counted + elapsed * self._share)
            return self._returned

    def _sample(self) -> None:
        busy = measure_busy_seconds()
        own = self._own_cpu()
        now = time.monotonic()
        foreign = (busy - self._busy) - (own - self._own)
        self._share = compute_share(foreign, now - self._sampled_at, len(_allowed_cores()))
        self._counted += (now - self._sampled_at) * self._share
        self._sampled_at = now
        self._busy = busy
        self._own = own


def compute_share(foreign: float, seconds: float, cores: int) -> float:
    """Return the share of the machine that other programs left. Pure.

    Args:
        foreign: CPU seconds that they used; measurements at slightly different moments can make
            it negative.
        seconds: Within how many seconds.
        cores: Of the machine.
    """
    return min(1.0, max(MIN_SHARE, 1.0 - foreign / (cores * seconds)))


def measure_busy_seconds() -> float:
    """Return the CPU seconds that all programs have used on the cores that this process may use."""
    per_core = psutil.cpu_times(percpu=True)
    cores = [per_core[n] for n in _allowed_cores() if n < len(per_core)]
    # Linux counts the time of guests in that of users as well.
    guests = [getattr(c, "guest", 0.0) + getattr(c, "guest_nice", 0.0) for c in cores]
    idle = [c.idle + getattr(c, "iowait", 0.0) for c in cores]
    return sum(sum(core) for core in cores) - sum(idle) - sum(guests)


def _allowed_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count() or 1))
