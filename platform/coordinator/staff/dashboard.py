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
from coordinator.lib import heartbeats
from coordinator.lib.task_queues import TASK_QUEUE
from coordinator.lib.ttl_cache import TtlCache
from coordinator.lib.valkey import valkey_client
from coordinator.notify.models import Delivery, Notification
from coordinator.runs.models import Run
from coordinator.staff import recent_errors
from coordinator.telemetry import report_queue

ACTIVE_STATUSES = [RunStatus.RECRUITING, RunStatus.TRAINING, RunStatus.PAUSED]
MAX_RUNS = 12
# The counts read whole tables, so all open dashboards share them for one refresh interval.
counts_cache: TtlCache[None, dict[str, Any]] = TtlCache(5.0)


def collect_dashboard() -> dict[str, Any]:
    """Collect everything that the dashboard shows.

    Returns:
        A dict with "counts", "runs", "delayed_since", "queues", "errors" and "at"; "queues" and
        "errors" are None while Valkey is unreachable.
    """
    since = heartbeats.delayed_since()
    try:
        queues = _queues()
        errors = [{**row, "at": _local_time(row["at"])} for row in recent_errors.list_recent()]
    except redis.exceptions.RedisError:
        queues = None
        errors = None
    return {
        "counts": counts_cache.get(None, _counts),
        "runs": _runs(),
        "delayed_since": _local_time(since) if since else None,
        "queues": queues,
        "errors": errors,
        "at": timezone.now(),
    }


def _counts() -> dict[str, Any]:
    """Count runs, machines, people, emails and webhook calls."""
    yesterday = timezone.now() - timedelta(days=1)
    by_status = dict(Run.objects.values_list("status").annotate(Count("pk")))
    alive = Membership.objects.alive()
    return {
        "runs": {status.value: by_status.get(status.value, 0) for status in RunStatus},
        "machines": Machine.objects.filter(revoked=None).count(),
        "alive": alive.values("machine").distinct().count(),
        "rate": alive.aggregate(rate=Sum("rate"))["rate"] or 0.0,
        "people": User.objects.filter(is_active=True).count(),
        "new_people": User.objects.filter(date_joined__gt=yesterday, left=None).count(),
        "banned": User.objects.filter(banned__isnull=False).count(),
        "emails": Notification.objects.filter(email_due__isnull=False).count(),
        "webhook_calls": Delivery.objects.filter(due__isnull=False).count(),
    }


def _runs() -> list[dict[str, Any]]:
    """List active runs, the newest first, with their machines and rates."""
    active = Run.objects.filter(status__in=ACTIVE_STATUSES).select_related("owner")
    runs = list(active.order_by("-pk")[:MAX_RUNS])
    sums = (
        Membership.objects.alive()
        .filter(run__in=runs)
        .values("run")
        .annotate(machines=Count("pk"), rate_now=Sum("rate", filter=Q(rate__gt=0)))
    )
    sums_by_run = {row["run"]: row for row in sums}
    rows = []
    for run in runs:
        row = sums_by_run.get(run.pk, {"machines": 0, "rate_now": None})
        rows.append({"run": run, "alive": row["machines"], "rate": row["rate_now"] or 0.0})
    return rows


def _queues() -> dict[str, Any]:
    """Read the lengths of the queues, and the memory that Valkey uses."""
    with valkey_client().pipeline(transaction=False) as pipe:
        pipe.llen(report_queue.PENDING_KEY)
        pipe.lindex(report_queue.PENDING_KEY, 0)
        pipe.llen(TASK_QUEUE)
        pipe.info("memory")
        reports, oldest, tasks, memory = pipe.execute()
    return {
        "reports": reports,
        "oldest": max(0.0, time.time() - json.loads(oldest)["received"]) if oldest else 0.0,
        "tasks": tasks,
        "errors": recent_errors.count_recent(3600),
        "memory": memory["used_memory"],
        "mirror": settings.MIRROR_NAME,
    }


def _local_time(at: float) -> datetime:
    return datetime.fromtimestamp(at, timezone.get_current_timezone())
