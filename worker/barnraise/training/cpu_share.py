"""Compute for a share of the time only, by sleeping between parts of a step."""

import time
from collections.abc import Callable

SHORTEST_WORK = 0.05  # seconds: sleeping more often would cost more than it saves
SLEEP_SECONDS = 0.2  # after which a sleeping worker looks whether it is to stop


class CpuShare:
    """Sleeps so that a worker computes for a percentage of the time, whatever a part takes.

    Attributes:
        slept_in_step: seconds, since the last `start_step`.
    """

    def __init__(
        self,
        percentage: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Obey the percentage that the callable returns; None is no limit."""
        self._percentage = percentage
        self._clock = clock
        self._sleep = sleep
        self._awake_since = clock()
        self.slept_in_step = 0.0

    def start_step(self) -> None:
        """Begin to count: what came before was no computation."""
        self._awake_since = self._clock()
        self.slept_in_step = 0.0

    def rest(self, should_stop: Callable[[], bool]) -> None:
        """Sleep for as long as the work since the last rest requires, unless `should_stop`."""
        percentage = self._percentage()
        worked = self._clock() - self._awake_since
        if percentage is None or percentage >= 100 or worked < SHORTEST_WORK:
            return
        started = self._clock()
        ends = started + worked * (100 - percentage) / percentage
        while (left := ends - self._clock()) > 0 and not should_stop():
            self._sleep(min(left, SLEEP_SECONDS))
        self._awake_since = self._clock()
        self.slept_in_step += self._awake_since - started
