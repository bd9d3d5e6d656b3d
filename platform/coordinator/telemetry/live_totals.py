"""Machines at work and their rates over all runs, from the live store: true without Celery."""

import time
from dataclasses import dataclass, field
from uuid import UUID

import redis.exceptions
from django.db.models import Sum

from barnraise.protocol.enums import RunStatus
from coordinator.fleet.models import Membership, is_alive
from coordinator.runs.models import Run
from coordinator.telemetry import report_queue

ACTIVE_STATUSES = [RunStatus.RECRUITING, RunStatus.TRAINING, RunStatus.PAUSED]
MAX_RUNS = 500  # whose live figures are read


@dataclass(frozen=True)
class LiveTotals:
    """What the machines of this site do now."""

    machines: int  # how many report
    rate: float  # their tokens per second, as they state them
    # (machines, rate) of each run that has any.
    by_run: dict[UUID, tuple[int, float]] = field(default_factory=dict)


def live_totals() -> LiveTotals:
    """Add up the newest reports of all active runs; without Valkey, what Postgres holds."""
    runs = Run.objects.filter(status__in=ACTIVE_STATUSES).order_by("-pk")
    try:
        return _from_live_store(list(runs.values_list("pk", "report_every")[:MAX_RUNS]))
    except redis.exceptions.RedisError:
        alive = Membership.objects.alive().filter(run__status__in=ACTIVE_STATUSES)
        rate = alive.aggregate(rate=Sum("rate"))["rate"] or 0.0
        return LiveTotals(alive.values("machine").distinct().count(), rate)


def _from_live_store(runs: list[tuple[UUID, float]]) -> LiveTotals:
    now = time.time()
    machines: set[str] = set()
    by_run: dict[UUID, tuple[int, float]] = {}
    for run, report_every in runs:
        alive = {
            machine: row["rate"]
            for machine, row in report_queue.live_rows(run).items()
            if is_alive(
                row["last_seen"],
                row["activity"],
                max(report_every, row.get("report_interval", 0.0)),
                now,
            )
        }
        if alive:
            by_run[run] = len(alive), sum(alive.values())
            machines |= alive.keys()
    return LiveTotals(len(machines), sum(rate for _, rate in by_run.values()), by_run)
