"""Delete old rows. Every step may be interrupted: the next run continues."""

import time
from datetime import timedelta
from typing import Any

from django.db import connection
from django.db.models import Count
from django.utils import timezone

from coordinator.runs.models import Run
from coordinator.telemetry import checkpoints, samples
from coordinator.telemetry.machine_history import READINGS_KEPT
from coordinator.telemetry.models import ReportReceipt, Rollup, RunEvent, SystemReading

DAY = 86_400
ROLLUPS_KEPT = {10: 2 * DAY, 60: 30 * DAY}  # width → seconds; rows of an hour are kept
# Then one training loss of a machine is kept for each hour, and every validation loss.
ALL_POINTS_KEPT = 30 * DAY
EVENTS_KEPT = timedelta(days=90)
BATCH_ROWS = 20_000
RECEIPTS_KEPT = timedelta(days=7)  # of machines that never closed a gap


def delete_old_rows(now: float | None = None, seconds: float = 60.0) -> int:
    """Delete old rows for at most so many seconds.

    Args:
        now: seconds since 1970.
        seconds: when to stop.

    Returns:
        How many rows were deleted.
    """
    now, ends = time.time() if now is None else now, time.monotonic() + seconds
    deleted = sum(
        _delete_in_batches(Rollup, ends, width=width, bucket__lt=now - lifetime)
        for width, lifetime in ROLLUPS_KEPT.items()
    )
    deleted += _delete_in_batches(SystemReading, ends, minute__lt=now - READINGS_KEPT)
    while True:
        thinned = _thin(now - ALL_POINTS_KEPT)
        deleted += thinned
        if not thinned or time.monotonic() >= ends:
            break
    deleted += _delete_in_batches(RunEvent, ends, at__lt=timezone.now() - EVENTS_KEPT)
    deleted += ReportReceipt.objects.filter(received__lt=timezone.now() - RECEIPTS_KEPT).delete()[0]
    deleted += sum(checkpoints.prune_checkpoints(run) for run in _runs_with_many_checkpoints())
    return deleted + sum(samples.prune_samples(run) for run in _runs_with_many_samples())


def _delete_in_batches(model: Any, ends: float, **condition: Any) -> int:
    deleted = 0
    while time.monotonic() < ends:
        batch = list(model.objects.filter(**condition).values_list("pk", flat=True)[:BATCH_ROWS])
        deleted += model.objects.filter(pk__in=batch).delete()[0] if batch else 0
        if len(batch) < BATCH_ROWS:
            break
    return deleted


def _thin(before: float) -> int:
    """Keep the first training loss of each machine and hour."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            DELETE FROM telemetry_losspoint WHERE id IN (
                SELECT id FROM (
                    SELECT id, row_number() OVER (
                        PARTITION BY membership_id, floor(at / 3600) ORDER BY at, id
                    ) AS place
                    FROM telemetry_losspoint WHERE kind = 'train' AND at < %s
                ) AS placed WHERE place > 1 LIMIT %s
            )
            """,
            [before, BATCH_ROWS],
        )
        return cursor.rowcount


def _runs_with_many_samples() -> Any:
    return Run.objects.annotate(count=Count("samples")).filter(count__gt=samples.MAX_SAMPLES)


def _runs_with_many_checkpoints() -> Any:
    return Run.objects.annotate(count=Count("checkpoints")).filter(
        count__gt=checkpoints.MAX_CHECKPOINTS
    )
