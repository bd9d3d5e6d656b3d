"""Schedule periodic tasks from the database, where staff may change them.

`CELERY_BEAT_SCHEDULER` names `ResilientScheduler`.
"""

import logging
import time
from typing import Any

from celery.schedules import schedstate
from django.db import DatabaseError, InterfaceError, connection
from django.utils import timezone
from django_celery_beat.schedulers import DatabaseScheduler, ModelEntry

from coordinator.lib import heartbeats
from coordinator.lib.monotonic_clock import uptime

log = logging.getLogger("coordinator.celery")
MIN_CLOCK_JUMP = 1.0  # seconds; a smaller change of the clock is drift


class ScheduleEntry(ModelEntry):
    """Run a task even if its last run lies in the future, because the clock was ahead then.

    Otherwise the task would wait for as long as the clock was ahead.
    """

    def is_due(self) -> schedstate:
        """Return whether the task is due, counting from now at the latest."""
        self.last_run_at = min(self.last_run_at, timezone.now())
        return super().is_due()


class ResilientScheduler(DatabaseScheduler):
    """Continue with the last schedule that was read while Postgres is away.

    The base class reads the whole schedule again every five minutes and would end with the error of
    a failed read: no periodic task would run until somebody noticed.
    """

    Entry = ScheduleEntry
    _clock_offset: float | None = None  # wall clock minus uptime, in seconds

    def all_as_schedule(self) -> dict[str, ScheduleEntry]:
        """Read the schedule; return the previous one if the database does not answer."""
        try:
            return super().all_as_schedule()
        except (DatabaseError, InterfaceError) as error:
            if self._schedule is None:  # at the start; the supervisor starts the process again
                raise
            log.warning("the schedule could not be read again, and stays as it was: %s", error)
            return self._schedule

    def sync(self) -> None:
        """Save when each task last ran, unless this thread is in a transaction.

        Celery's handler of SIGTERM calls this wherever the main thread is. The base class drops the
        connection of a transaction under way, whose next statement then fails. What is not saved
        runs again a little earlier after the next start.
        """
        if connection.in_atomic_block:
            return
        super().sync()

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Run due tasks; after a change of the clock, sort the queue by the new time first."""
        before = self._clock_offset
        self._clock_offset = time.time() - uptime()
        if before is not None and abs(self._clock_offset - before) > MIN_CLOCK_JUMP:
            log.warning(
                "the clock was set by %+.0f s: periodic tasks are rescheduled",
                self._clock_offset - before,
            )
            self._heap = None
        seconds_until_next = super().tick(*args, **kwargs)
        heartbeats.record(heartbeats.Part.SCHEDULE)
        return seconds_until_next
