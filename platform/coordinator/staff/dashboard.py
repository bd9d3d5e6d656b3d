"""The numbers of the staff's dashboard, read with a few queries every few seconds."""

import json
import shutil
import time
from datetime import datetime, timedelta
from typing import Any

import redis.exceptions
from django.conf import settings
from django.db.models import Count
from django.utils import timezone

from barnraise.protocol.enums import RunStatus
from coordinator.accounts.models import Machine, User
from coordinator.lib import heartbeats
from coordinator.lib.backup_record import read_last_backup
from coordinator.lib.task_queues import TASK_QUEUE
from coordinator.lib.ttl_cache import TtlCache
from coordinator.lib.valkey import valkey_client
from coordinator.notify.models import Delivery, Notification
from coordinator.runs.models import Run
from coordinator.staff import recent_errors
from coordinator.telemetry import report_queue
from coordinator.telemetry.daily_lines import DailyLine, daily_lines
from coordinator.telemetry.live_totals import ACTIVE_STATUSES, LiveTotals, live_totals

MAX_RUNS = 12
# The counts read whole tables, so all open dashboards share them for one refresh interval.
counts_cache: TtlCache[None, dict[str, Any]] = TtlCache(5.0)
totals_cache: TtlCache[None, LiveTotals] = TtlCache(2.0)
lines_cache: TtlCache[None, list[DailyLine]] = TtlCache(60.0)


def collect_dashboard() -> dict[str, Any]:
    """Collect everything that the dashboard shows.

    Returns:
        A dict with "counts", "runs", "delayed_since", "queues", "errors" and "at"; "queues" and
        "errors" are None while Valkey is unreachable.
    """
    since = heartbeats.delayed_since()
    totals = totals_cache.get(None, live_totals)
    try:
        queues = _read_queues()
        errors = [{**row, "at": _local_time(row["at"])} for row in recent_errors.list_recent()]
    except redis.exceptions.RedisError:
        queues = None
        errors = None
    return {
        "counts": {
            **counts_cache.get(None, _count_totals),
            "alive": totals.machines,
            "rate": totals.rate,
        },
        "runs": _list_active_runs(totals),
        "lines": lines_cache.get(None, daily_lines),
        "backup": read_last_backup(settings.STATE_DIR),
        "disk": _free_disk(),
        "delayed_since": _local_time(since) if since else None,
        "queues": queues,
        "errors": errors,
        "at": timezone.now(),
    }


def _count_totals() -> dict[str, Any]:
    """Count runs, machines, people, emails and webhook calls."""
    yesterday = timezone.now() - timedelta(days=1)
    by_status = dict(Run.objects.values_list("status").annotate(Count("pk")))
    return {
        "runs": {status.value: by_status.get(status.value, 0) for status in RunStatus},
        "machines": Machine.objects.filter(revoked=None).count(),
        "people": User.objects.filter(is_active=True).count(),
        "new_people": User.objects.filter(date_joined__gt=yesterday, left=None).count(),
        "banned": User.objects.filter(banned__isnull=False).count(),
        "emails": Notification.objects.filter(email_due__isnull=False).count(),
        "webhook_calls": Delivery.objects.filter(due__isnull=False).count(),
    }


def _free_disk() -> dict[str, Any]:
    """Return the free space of the state folder's disk: bytes, and their share."""
    usage = shutil.disk_usage(settings.STATE_DIR)
    return {"free": usage.free, "share": usage.free / max(1, usage.total)}


def _list_active_runs(totals: LiveTotals) -> list[dict[str, Any]]:
    """List active runs, the newest first, with their machines and rates."""
    active = Run.objects.filter(status__in=ACTIVE_STATUSES).select_related("owner")
    runs = list(active.order_by("-pk")[:MAX_RUNS])
    rows = []
    for run in runs:
        machines, rate = totals.by_run.get(run.pk, (0, 0.0))
        rows.append({"run": run, "alive": machines, "rate": rate})
    return rows


def _read_queues() -> dict[str, Any]:
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
