"""The numbers of the staff's dashboard, read with a few queries every few seconds."""

import json
import time
from datetime import datetime, timedelta
from typing import Any

import redis.exceptions
from django.conf import settings
from django.db.models import Count, Q, Sum
from django.utils import timezone

from barnraise.protocol.enums import RunStatus
from coordinator.accounts.models import Machine, User
from coordinator.fleet.models import Membership
from coordinator.lib.ttl_cache import TtlCache
from coordinator.lib.valkey import valkey_client
from coordinator.notify.models import Delivery, Notification
from coordinator.runs.models import Run
from coordinator.staff import recent_errors
from coordinator.telemetry import report_queue

BUSY = [RunStatus.RECRUITING, RunStatus.TRAINING, RunStatus.PAUSED]
LISTED = 12  # runs
CELERY_QUEUE = "celery"
counts_cache: TtlCache[None, dict[str, Any]] = TtlCache(
    5.0
)  # as often as the page asks: every machine and person is counted


def collect_dashboard() -> dict[str, Any]:
    """Collect everything that the dashboard shows.

    Returns:
        A dict with "counts", "runs", "queues", "errors" and "at"; "queues" and "errors" are None
        while Valkey is unreachable.
    """
    try:
        queues, recent = (
            _queues(),
            [{**e, "at": _moment(e["at"])} for e in recent_errors.list_recent()],
        )
    except redis.exceptions.RedisError:
        queues, recent = None, None
    return {
        "counts": counts_cache.get(None, _counts),
        "runs": _runs(),
        "queues": queues,
        "errors": recent,
        "at": timezone.now(),
    }


def _counts() -> dict[str, Any]:
    day = timezone.now() - timedelta(days=1)
    by_status = dict(Run.objects.values_list("status").annotate(Count("pk")))
    alive = Membership.objects.alive()
    return {
        "runs": {status.value: by_status.get(status.value, 0) for status in RunStatus},
        "machines": Machine.objects.filter(revoked=None).count(),
        "alive": alive.values("machine").distinct().count(),
        "rate": alive.aggregate(rate=Sum("rate"))["rate"] or 0.0,
        "people": User.objects.filter(is_active=True).count(),
        "new_people": User.objects.filter(date_joined__gt=day, left=None).count(),
        "banned": User.objects.filter(banned__isnull=False).count(),
        "emails": Notification.objects.filter(email_due__isnull=False).count(),
        "webhook_calls": Delivery.objects.filter(due__isnull=False).count(),
    }


def _runs() -> list[dict[str, Any]]:
    """List active runs, the newest first, with their machines and rates."""
    runs = list(
        Run.objects.filter(status__in=BUSY).select_related("owner").order_by("-pk")[:LISTED]
    )
    alive = {
        run: (machines, rate)
        for run, machines, rate in Membership.objects.alive()
        .filter(run__in=runs)
        .values("run")
        .annotate(machines=Count("pk"), rate_now=Sum("rate", filter=Q(rate__gt=0)))
        .values_list("run", "machines", "rate_now")
    }
    return [
        {
            "run": run,
            "alive": alive.get(run.pk, (0, 0))[0],
            "rate": alive.get(run.pk, (0, 0))[1] or 0.0,
        }
        for run in runs
    ]


def _queues() -> dict[str, Any]:
    valkey = valkey_client()
    with valkey.pipeline(transaction=False) as pipe:
        pipe.llen(report_queue.PENDING_KEY).lindex(report_queue.PENDING_KEY, 0).llen(
            CELERY_QUEUE
        ).info("memory")
        reports, oldest, tasks, memory = pipe.execute()
    return {
        "reports": reports,
        "oldest": max(0.0, time.time() - json.loads(oldest)["received"]) if oldest else 0.0,
        "tasks": tasks,
        "errors": recent_errors.count_recent(3600),
        "memory": memory["used_memory"],
        "mirror": settings.MIRROR_NAME,
    }


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, timezone.get_current_timezone())
