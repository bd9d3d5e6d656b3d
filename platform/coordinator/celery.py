"""Define the Celery application: `celery -A coordinator.celery:app worker`.

The schedule is in the settings. Every task of the site is a `Task`: it is retried while Postgres or
Valkey are away, carries the id of the request that queued it, and is counted. Tasks are idempotent:
running one twice, or half and then whole, changes nothing more than running it once.

Celery applies a task's `time_limit` in pools of processes only. In a solo worker, which the site
uses, a task ends because everything that it waits for has a limit of its own: statements
(`STATEMENT_SECONDS`), a host of Postgres that vanishes (`KEEPALIVES` in the settings), Valkey,
other sites and the mail server. A health check restarts a worker that stands still nevertheless.
"""

import logging
import os
import sys
import time
from typing import Any

import celery
import kombu
import redis.exceptions
from celery import Celery, signals
from celery.exceptions import Retry
from celery.result import AsyncResult
from django.db import InterfaceError, OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from coordinator.lib import counters, request_id
from coordinator.lib.exceptions import RestorePendingError

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "coordinator.settings")
log = logging.getLogger("coordinator.celery")
REQUEST_HEADER = "request_id"
STATEMENT_SECONDS = 300  # for which Postgres works on one statement of a task


class Task(celery.Task):
    """Limit, retry, count and name a task.

    A task that runs every few seconds sets `max_retries` to 0, because its next run comes soon.
    """

    time_limit = 120  # seconds, in a worker whose pool has processes
    autoretry_for = (
        OperationalError,
        InterfaceError,
        redis.exceptions.ConnectionError,
        redis.exceptions.TimeoutError,
    )
    max_retries = 3
    retry_backoff = 2  # seconds
    retry_backoff_max = 60  # seconds
    retry_jitter = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> AsyncResult:
        """Queue the task with the id of the current request."""
        headers = {REQUEST_HEADER: request_id.current(), **(options.get("headers") or {})}
        return super().apply_async(args, kwargs, **{**options, "headers": headers})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task and count its outcome; skip it while a restore is pending."""
        headers = self.request.headers or {}
        caller = getattr(self.request, REQUEST_HEADER, None) or headers.get(REQUEST_HEADER)
        request_id.enter(caller or str(self.request.id or ""))
        started = time.monotonic()
        outcome = "failed"
        try:
            result = super().__call__(*args, **kwargs)
            outcome = "done"
            return result
        except Retry:
            outcome = "retried"
            raise
        except RestorePendingError as error:
            outcome = "held"
            log.warning("%s did nothing: %s", self.name, error.sentence)
            return None
        finally:
            counters.increment("barnraise_tasks_total", task=str(self.name), outcome=outcome)
            counters.observe(
                "barnraise_task_seconds", time.monotonic() - started, task=str(self.name)
            )


class BrokerConnection(kombu.Connection):  # pyright: ignore[reportPrivateImportUsage] - kombu loads its names lazily
    """Retry a lost connection to Valkey every second.

    The base class waits longer after each failure, up to half a minute, and other mirrors' changes
    would wait with it.
    """

    def ensure_connection(self, *args: Any, **options: Any) -> Any:
        """Connect, with a constant interval between attempts."""
        options |= {"interval_start": 1, "interval_step": 0, "interval_max": 1}
        return super().ensure_connection(*args, **options)


@signals.worker_init.connect
@signals.beat_init.connect
def refuse_other_site(**_: Any) -> None:
    """End this process at its start if its keys are another site's."""
    from coordinator.eventlog.database_owner import describe_refusal

    if refusal := describe_refusal():
        sys.exit(refusal)


@signals.worker_init.connect
def limit_statements(**_: Any) -> None:
    """Limit the statements of this worker: one that locks or data delay forever ends as an error.

    Pages and commands have no such limit: a migration or a backup may take as long as it takes.
    """
    connection_created.connect(_limit_statements_of, dispatch_uid="limit_statements")


def _limit_statements_of(connection: BaseDatabaseWrapper, **_: Any) -> None:
    with connection.cursor() as cursor:
        milliseconds = str(STATEMENT_SECONDS * 1000)
        cursor.execute("SELECT set_config('statement_timeout', %s, false)", [milliseconds])


app = Celery("coordinator", task_cls=Task)
app.amqp.Connection = BrokerConnection
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
