"""A clock that runs slower the busier the machine is, for limits that hold there too."""

import threading
import time
from bisect import bisect_right

SAMPLE_SECONDS = 0.2  # between two samples
WORK_SECONDS = 0.004  # of processor time, in one sample


class QuietClock:
    """Count the seconds that a machine without other work would have needed.

    A thread measures how long a few milliseconds of computing take. Where that is four times as
    long, because others use the processors, the clock runs at a quarter of its speed.

    Attributes:
        seconds: Seconds so far.
    """

    def __init__(self):
        self.seconds = 0.0
        self._walls = [time.time()]  # of the samples
        self._readings = [0.0]
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quiet clock", daemon=True)
        self._thread.start()

    def at(self, wall: float) -> float:
        """Return the clock's seconds at a moment, given in seconds since 1970."""
        return self._readings[max(0, bisect_right(self._walls, wall) - 1)]

    def stop(self) -> None:
        """Stop the clock."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._ending.wait(SAMPLE_SECONDS):
            started = time.monotonic()
            work_until = time.thread_time() + WORK_SECONDS
            while time.thread_time() < work_until:
                continue
            now = time.monotonic()
            speed = min(1.0, WORK_SECONDS / (now - started))
            self.seconds += (now - before) * speed
            before = now
            self._readings.append(self.seconds)
            self._walls.append(time.time())
