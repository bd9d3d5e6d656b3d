"""What runs when: the schedule in the database, which staff may change (`CELERY_BEAT_SCHEDULER`)."""

import logging

from django.db import DatabaseError, InterfaceError
from django_celery_beat.schedulers import DatabaseScheduler

log = logging.getLogger("coordinator.celery")


class Schedule(DatabaseScheduler):
    """Goes by the last one it read while Postgres is away. It reads all of it anew every five minutes, and would end
    with the error of a read that fails: nothing would be done by the clock any more until somebody looked."""

    def all_as_schedule(self):
        try:
            return super().all_as_schedule()
        except (DatabaseError, InterfaceError) as error:
            if self._schedule is None:  # at its start: whoever supervises it starts it again
                raise
            log.warning("the schedule could not be read again, and stays as it was: %s", error)
            return self._schedule
