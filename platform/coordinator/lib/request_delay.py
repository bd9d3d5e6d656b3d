"""Measure for how long this process lets requests wait for their turn."""

import threading


class RequestDelay:
    """The mean delay of the requests since the last look. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._requests = 0

    def record(self, seconds: float) -> None:
        """Record that a request has waited so long."""
        with self._lock:
            self._seconds += seconds
            self._requests += 1

    def pop_mean(self) -> float:
        """Return the mean in seconds since the last call; 0 if there was no request."""
        with self._lock:
            mean = self._seconds / max(1, self._requests)
            self._seconds, self._requests = 0.0, 0
        return mean


request_delay = RequestDelay()
