"""The last 24 hours of this site, an hour a point, for the staff's dashboard."""

import time
from dataclasses import dataclass

from django.db.models import Count, F, Sum

from coordinator.telemetry.models import Rollup

HOUR = 3600
HOURS = 24


@dataclass(frozen=True)
class DailyLine:
    """One figure over the last 24 hours."""

    name: str
    values: tuple[float, ...]  # one for each hour, the oldest first; the last is under way
    unit: str  # what follows its number


def daily_lines(now: float | None = None) -> list[DailyLine]:
    """Read machines at work, tokens per second and reports per minute, by one query."""
    now = time.time() if now is None else now
    last = int(now) // HOUR * HOUR
    first = last - (HOURS - 1) * HOUR
    rows = (
        Rollup.objects.filter(width=HOUR, bucket__gte=first)
        .order_by()
        .values_list("bucket")
        .annotate(
            machines=Count("membership__machine", distinct=True),
            rate=Sum(F("rate_sum") / F("reports")),
            reports=Sum("reports"),
        )
    )
    by_bucket = {bucket: figures for bucket, *figures in rows}
    elapsed_minutes = max(1.0, (now - last) / 60)
    hours = [by_bucket.get(first + n * HOUR, (0, 0.0, 0)) for n in range(HOURS)]
    reports = [count / 60 for _, _, count in hours[:-1]] + [hours[-1][2] / elapsed_minutes]
    return [
        DailyLine("Machines", tuple(float(machines) for machines, _, _ in hours), ""),
        DailyLine("Tokens/s", tuple(rate or 0.0 for _, rate, _ in hours), ""),
        DailyLine("Reports", tuple(reports), "a minute"),
    ]
