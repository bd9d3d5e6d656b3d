"""Watch how short this machine's memory is while a worker trains."""

import time
from collections.abc import Callable

from barnraise.planning.hardware import memory_facts
from barnraise.planning.limits import Limits
from barnraise.planning.memory_pressure import MemoryFacts, PressureWatch

MEASURE_SECONDS = 2.0  # between two measurements


class MemoryWatch:
    """Measure memory now and then, and decide whether another plan is needed.

    It outlives a worker that ran out of memory.

    Args:
        limits: what the owner lets the worker use; None for no limits.
        measure: returns the facts of the memory now.
        clock: returns monotonic seconds.

    Attributes:
        limits: what the owner lets the worker use.
        pressure: for how long memory has been short.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        measure: Callable[[], MemoryFacts] = memory_facts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or Limits()
        self._measure = measure
        self._clock = clock
        self.pressure = PressureWatch()
        self._measured_at = -MEASURE_SECONDS

    def poll(self) -> None:
        """Measure, if the last measurement is old."""
        now = self._clock()
        if now - self._measured_at >= MEASURE_SECONDS:
            self._measured_at = now
            self.pressure = self.pressure.observe(self._measure(), now)

    def on_shortage(self) -> None:
        """Record that a smaller plan is needed, or that there is none: act again a minute later."""
        self.pressure = self.pressure.after_change(self._clock())

    def on_growth(self, has_grown: bool) -> None:
        """Record that a larger plan was made, or that there is none now."""
        self.pressure = self.pressure.after_growth(self._clock(), has_grown)
