"""Decide when a process that ended is started again, and when to give up. Pure."""

from dataclasses import dataclass, field

FIRST_DELAY_SECONDS = 0.2  # before the first restart; each further one waits twice as long
WINDOW_SECONDS = 60.0  # a failure counts for this long
MAX_FAILURES = 5  # in a window, with which the supervisor gives up


@dataclass
class RestartPolicy:
    """The failures of one process.

    A process that fails once in a while is started again almost at once. One that fails each time
    it starts waits longer and longer, and is given up with its fifth failure within a minute:
    starting it again repairs nothing.
    """

    _failures: list[float] = field(default_factory=list)  # times within the window, ascending

    def record_failure(self, now: float) -> float | None:
        """Record a failure, and return the seconds until the next start; None to give up.

        Args:
            now: Seconds of a monotonic clock.
        """
        self._failures = [at for at in self._failures if now - at < WINDOW_SECONDS] + [now]
        count = len(self._failures)
        return None if count >= MAX_FAILURES else FIRST_DELAY_SECONDS * 2 ** (count - 1)
