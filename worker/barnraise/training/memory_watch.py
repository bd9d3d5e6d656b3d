"""Watch how short this machine's memory is while a worker trains."""

import time
from collections.abc import Callable

from barnraise.planning.hardware import memory_facts
from barnraise.planning.memory_pressure import MemoryFacts, PressureWatch

MEASURE_SECONDS = 2.0  # between two measurements


class MemoryWatch:
    """Measure memory now and then, and decide whether a smaller plan is needed.

    Args:
        measure: returns the facts of the memory now.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        measure: Callable[[], MemoryFacts] = memory_facts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure = measure
        self._clock = clock
        self._watch = PressureWatch()
        self._measured_at = -MEASURE_SECONDS

    def poll(self) -> None:
        """Measure, if the last measurement is old."""
        now = self._clock()
        if now - self._measured_at >= MEASURE_SECONDS:
            self._measured_at = now
            self._watch = self._watch.observe(self._measure(), now)

    @property
    def has_shortage(self) -> bool:
        """Return whether memory was short at the last measurement."""
        return self._watch.short_since is not None

    @property
    def needs_smaller_plan(self) -> bool:
        """Return whether memory has been short for so long that a plan should use less of it."""
        return self._watch.is_short

    @property
    def facts(self) -> MemoryFacts:
        """Return what was measured last."""
        return self._watch.facts

    def on_plan_changed(self) -> None:
        """Record that a smaller plan was made, or that there is none: act again a minute later."""
        self._watch = self._watch.after_change(self._clock())
