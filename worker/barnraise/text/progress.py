"""Report how far the preparation of a text is."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger("barnraise")

# Reports progress: (what is done, how much of it, of how much).
ReportProgress = Callable[[str, int, int], None]
LOG_SECONDS = 10.0  # between two lines in a log


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Report nothing."""


class LogProgress:
    """Write a line to the log every LOG_SECONDS."""

    def __init__(self) -> None:
        self._logged = time.monotonic()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report how far a stage is."""
        now = time.monotonic()
        if now - self._logged > LOG_SECONDS:
            self._logged = now
            log.info("%s: %.1f %%", stage, 100 * done / max(1, total))
