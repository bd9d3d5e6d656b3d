"""Find out when a new machine has received the updates since the run's start."""

from collections.abc import Mapping

REPLAY_SECONDS = 60.0  # a machine that receives every update waits this long for the next one


class ReplayMonitor:
    """Finds out when a new machine waits no longer for updates. Pure: the time is an argument."""

    def __init__(self, target: Mapping[str, int], now: float) -> None:
        """Wait for the updates up to the version vector that most peers have."""
        self._target = target
        self._received = 0
        self._last_arrival = now

    def observe(self, vector: Mapping[str, int], now: float) -> bool:
        """Record which updates are here, and return whether to wait no longer."""
        received = sum(vector.values())
        if received > self._received:
            self._received, self._last_arrival = received, now
        has_all = all(vector.get(author, 0) >= seq for author, seq in self._target.items())
        return has_all or now - self._last_arrival > REPLAY_SECONDS
