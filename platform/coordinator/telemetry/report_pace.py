"""Decide how often machines report: less often while requests wait for their turn at this site.

Each answer to a report says in how many seconds the next one is due. Without load that is the run's
own interval. While requests wait, the intervals of all runs are stretched, quickly; once they have
not waited for a while, the intervals shrink, slowly: machines obey only with their next report, so
a quick return would overshoot. Between the two delays nothing changes.
"""

import math
import random
import threading
import time
from collections.abc import Callable

from coordinator.lib.request_delay import RequestDelay, request_delay

MOST_DELAY_SECONDS = 0.025  # requests that wait longer for their turn stretch the intervals
LEAST_DELAY_SECONDS = 0.008  # only those that wait less let the intervals shrink
LOOK_SECONDS = 3.0  # between two looks at the delay: its mean since the last look counts
MAX_GROWTH = 4.0  # of the stretch in `GROWTH_SECONDS`
GROWTH_SECONDS = 10.0
HALVING_SECONDS = 300.0
LONGEST_INTERVAL_SECONDS = 60.0  # of a run whose own interval is not longer
MAX_STRETCH = 12.0  # it makes 60 s of the 5 s that the form of a new run suggests
SPREAD = 0.25  # of a stretched interval, so that reports which waited together come apart


def next_stretch(stretch: float, delays: tuple[float, float], seconds: float) -> float:
    """Return by what factor the intervals are longer than the runs' own. Pure.

    Args:
        stretch: the factor until now.
        delays: for which requests have waited for their turn, the means of the last two looks in
            seconds. Both must agree, so that a short burst changes nothing.
        seconds: since the look before.
    """
    if min(delays) > MOST_DELAY_SECONDS:
        growth = min(MAX_GROWTH, min(delays) / MOST_DELAY_SECONDS)
        stretch *= growth ** min(1.0, seconds / GROWTH_SECONDS)
    elif max(delays) < LEAST_DELAY_SECONDS:
        stretch *= 0.5 ** (seconds / HALVING_SECONDS)
    return min(MAX_STRETCH, max(1.0, stretch))


def stretch_interval(report_every: float, stretch: float, spread: float = 0.0) -> float:
    """Return the seconds from a report to the next one. Pure.

    Args:
        report_every: the run's own interval in seconds; the result is not shorter.
        stretch: the factor of `next_stretch`.
        spread: from 0 to 1: where in the spread of a stretched interval the result lies.
    """
    longest = max(report_every, LONGEST_INTERVAL_SECONDS)
    interval = min(longest, report_every * stretch)
    return max(report_every, math.floor(10 * interval * (1 - SPREAD * spread)) / 10)


class ReportPace:
    """The intervals that one process answers, by its own load.

    The processes of a site need not agree: each answer counts for one report of one machine.
    """

    def __init__(
        self,
        delay: RequestDelay = request_delay,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._delay = delay
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        self._stretch = 1.0
        self._mean_before = 0.0  # of the look before
        self._looked_at = clock()

    def choose_interval(self, report_every: float) -> float:
        """Return in how many seconds the next report is due, of a run with this interval."""
        with self._lock:
            seconds = self._clock() - self._looked_at
            if seconds >= LOOK_SECONDS:
                mean = self._delay.pop_mean()
                delays = self._mean_before, mean
                self._stretch = next_stretch(self._stretch, delays, seconds)
                self._mean_before = mean
                self._looked_at += seconds
            return stretch_interval(report_every, self._stretch, self._chance())


report_pace = ReportPace()
