"""Log a warning that repeats once a minute, with the number of its repetitions."""

import logging
import time
from collections.abc import Callable

from barnraise.protocol.table_sizes import SOME, store_newest

QUIET_SECONDS = 60.0  # in which warnings of one kind are logged once
# Of warnings about other machines: they stand in the log file, and not on a volunteer's terminal.
STRANGERS_LOGGER = "barnraise.strangers"


class RepeatedWarnings:
    """Warnings that a stranger can cause as often as they like."""

    def __init__(
        self, log: logging.Logger | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Log to `log`, or to that of strangers; `clock` returns seconds."""
        self._log = log or logging.getLogger(STRANGERS_LOGGER)
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}  # kind → when it was logged, repetitions

    def warn(self, kind: str, message: str, *values: object) -> None:
        """Log a warning, unless one of its kind was logged within a minute.

        A kind names what repeats: the event and who causes it.
        """
        now = self._clock()
        logged_at, repetitions = self._logged.get(kind, (now - QUIET_SECONDS, 0))
        if now < logged_at + QUIET_SECONDS:
            store_newest(self._logged, kind, (logged_at, repetitions + 1), SOME)
            return
        store_newest(self._logged, kind, (now, 0), SOME)
        if repetitions:
            message += f" (and {repetitions:,} more like it before)"
        self._log.warning(message, *values)
