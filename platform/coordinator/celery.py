"""The Celery application: `celery -A coordinator.celery:app worker`. What runs when is in the settings.

Every task of the site is a `Task`: it has a time limit, is tried again when Postgres or Valkey are away, bears the name
of the request that handed it out, and is counted. Tasks are written so that running one twice, or half and then whole,
changes nothing more than running it once.
"""

import logging
import os
import time
from typing import Any

import celery
import kombu
import redis.exceptions
from celery import Celery
from django.db import InterfaceError, OperationalError

from coordinator.lib import counters, request_id

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "coordinator.settings")
log = logging.getLogger("coordinator.celery")
REQUEST = "request_id"  # a task's header


class Task(celery.Task):
    """What is asked for every few seconds is not tried again: the next time comes soon enough."""

    time_limit = 120  # seconds
    autoretry_for = (
        OperationalError,
        InterfaceError,
        redis.exceptions.ConnectionError,
        redis.exceptions.TimeoutError,
    )
    max_retries = 3
    retry_backoff, retry_backoff_max, retry_jitter = 2, 60, True

    def apply_async(self, args=None, kwargs=None, **options: Any):
        options["headers"] = {REQUEST: request_id.current(), **(options.get("headers") or {})}
        return super().apply_async(args, kwargs, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        asked = getattr(self.request, REQUEST, None) or (self.request.headers or {}).get(REQUEST)
        from coordinator.eventlog.writer import (
            RestorePendingError,  # models are there once Celery has set Django up
        )

        request_id.enter(asked or str(self.request.id or ""))
        began, ended = time.monotonic(), "failed"
        try:
            result = super().__call__(*args, **kwargs)
            ended = "done"
            return result
        except celery.exceptions.Retry:
            ended = "retried"
            raise
        except RestorePendingError as error:
            ended = "held"
            log.warning("%s did nothing: %s", self.name, error.sentence)
            return None
        finally:
            counters.count("barnraise_tasks_total", task=self.name, outcome=ended)
            counters.time("barnraise_task_seconds", time.monotonic() - began, task=self.name)


class Broker(kombu.Connection):
    """A worker that lost Valkey asks every second whether it is back; by itself it would wait longer each time, up to
    half a minute, and other mirrors' changes with it."""

    def ensure_connection(self, *args: Any, **options: Any):
        options |= {"interval_start": 1, "interval_step": 0, "interval_max": 1}
        return super().ensure_connection(*args, **options)


app = Celery("coordinator", task_cls=Task)
app.amqp.Connection = Broker
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
