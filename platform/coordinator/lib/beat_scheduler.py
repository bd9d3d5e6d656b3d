"""What runs when: the schedule in the database, which staff may change (`CELERY_BEAT_SCHEDULER`)."""

import logging
import time

from django.db import DatabaseError, InterfaceError
from django.utils import timezone
from django_celery_beat.schedulers import DatabaseScheduler, ModelEntry

from coordinator.lib.monotonic_clock import uptime

log = logging.getLogger("coordinator.celery")
SET = 1.0  # seconds that a clock jumps at least, when somebody sets it


class Entry(ModelEntry):
    """A last run that is still to come was by a clock that was ahead and is put right: it counts from now. By itself it
    would wait for as long as the clock was ahead, and its mirror with it."""

    def is_due(self):
        self.last_run_at = min(self.last_run_at, timezone.now())
        return super().is_due()


class Schedule(DatabaseScheduler):
    """Goes by the last one it read while Postgres is away. It reads all of it anew every five minutes, and would end
    with the error of a read that fails: nothing would be done by the clock any more until somebody looked."""

    Entry = Entry
    _ahead: float | None = None  # seconds, of a clock that nobody sets

    def all_as_schedule(self):
        try:
            return super().all_as_schedule()
        except (DatabaseError, InterfaceError) as error:
            if self._schedule is None:  # at its start: whoever supervises it starts it again
                raise
            log.warning("the schedule could not be read again, and stays as it was: %s", error)
            return self._schedule

    def tick(self, *args, **kwargs):
        """Where the clock was set they line up anew: the line is by the old one."""
        before, self._ahead = self._ahead, time.time() - uptime()
        if before is not None and abs(self._ahead - before) > SET:
            log.warning(
                "the clock was set by %+.0f s: all that runs by it lines up anew",
                self._ahead - before,
            )
            self._heap = None
        return super().tick(*args, **kwargs)
