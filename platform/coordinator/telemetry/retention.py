"""What is kept for how long. Every step can be cut off and begun again: what is left is done the next time."""

import time
from datetime import timedelta

from django.db import connection
from django.db.models import Count
from django.utils import timezone

from coordinator.runs.models import Run
from coordinator.telemetry import checkpoints
from coordinator.telemetry.models import ReportReceipt, Rollup, RunEvent

DAY = 86_400
ROLLUPS_KEPT = {10: 2 * DAY, 60: 30 * DAY}  # seconds of each width; rows of an hour stay
POINTS_WHOLE = (
    30 * DAY
)  # after which one training loss of a machine stays an hour, and every validation
EVENTS_KEPT = timedelta(days=90)
AT_ONCE = 20_000  # rows a statement
RECEIPTS_KEPT = timedelta(days=7)  # of machines that never came back to close a gap


def delete_old_rows(now: float | None = None, seconds: float = 60.0) -> int:
    """How many rows went. Stops after so many seconds."""
    now, ends = time.time() if now is None else now, time.monotonic() + seconds
    gone = sum(
        _by_batches(Rollup, ends, width=width, bucket__lt=now - kept)
        for width, kept in ROLLUPS_KEPT.items()
    )
    while (thinned := _thin(now - POINTS_WHOLE)) and time.monotonic() < ends:
        gone += thinned
    gone += thinned
    gone += _by_batches(RunEvent, ends, at__lt=timezone.now() - EVENTS_KEPT)
    gone += ReportReceipt.objects.filter(received__lt=timezone.now() - RECEIPTS_KEPT).delete()[0]
    return gone + sum(checkpoints.prune_checkpoints(run) for run in _with_many_checkpoints())


def _by_batches(model, ends: float, **which) -> int:
    gone = 0
    while time.monotonic() < ends:
        batch = list(model.objects.filter(**which).values_list("pk", flat=True)[:AT_ONCE])
        gone += model.objects.filter(pk__in=batch).delete()[0] if batch else 0
        if len(batch) < AT_ONCE:
            break
    return gone


def _thin(before: float) -> int:
    """Of each machine's training losses of an hour, the first stays."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            DELETE FROM telemetry_losspoint WHERE id IN (
                SELECT id FROM (
                    SELECT id, row_number() OVER (PARTITION BY membership_id, floor(at / 3600) ORDER BY at, id) AS place
                    FROM telemetry_losspoint WHERE kind = 'train' AND at < %s
                ) AS placed WHERE place > 1 LIMIT %s
            )
            """,
            [before, AT_ONCE],
        )
        return cursor.rowcount


def _with_many_checkpoints():
    return Run.objects.annotate(count=Count("checkpoints")).filter(
        count__gt=checkpoints.MAX_CHECKPOINTS
    )
