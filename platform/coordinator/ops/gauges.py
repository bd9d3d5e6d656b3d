"""Measure the site's present state for Prometheus: gauges, looked up when they are requested."""

from collections.abc import Iterator
from dataclasses import dataclass

from django.db.models import Count, Q

from coordinator.eventlog import writer
from coordinator.eventlog.models import Aggregate, LogEvent
from coordinator.lib import heartbeats
from coordinator.lib.counters import series_name
from coordinator.lib.task_queues import TASK_QUEUE, WEBHOOK_QUEUE
from coordinator.lib.valkey import valkey_client
from coordinator.live.broadcaster import watchers
from coordinator.runs.models import Run, Status
from coordinator.telemetry import report_queue
from coordinator.telemetry.live_totals import live_totals


@dataclass(frozen=True)
class Gauge:
    """Hold one family's values: labels → value."""

    name: str
    help: str
    values: list[tuple[dict[str, str], float]]

    def lines(self) -> Iterator[str]:
        """Yield the lines of Prometheus's text format."""
        yield f"# HELP {self.name} {self.help}."
        yield f"# TYPE {self.name} gauge"
        yield from (
            f"{series_name(self.name, **labels)} {value:g}" for labels, value in self.values
        )


def exposition() -> Iterator[str]:
    """Yield the lines of all gauges.

    Raises:
        RedisError: Valkey does not answer.
        DatabaseError: Postgres does not answer.
    """
    for gauge in (
        _count_runs(),
        _machines_alive(),
        _clock_offset(),
        _heartbeat_ages(),
        _measure_queues(),
    ):
        yield from gauge.lines()


def _count_runs() -> Gauge:
    counts = dict(Run.objects.order_by().values_list("status").annotate(Count("pk")))
    values = [({"status": status.value}, float(counts.get(status.value, 0))) for status in Status]
    return Gauge("barnraise_runs", "Runs, by status", values)


def _machines_alive() -> Gauge:
    return Gauge(
        "barnraise_machines_alive",
        "Machines that report, in runs under way",
        [({}, float(live_totals().machines))],
    )


def _clock_offset() -> Gauge:
    return Gauge(
        "barnraise_clock_ahead_seconds",
        "How far this machine's clock is ahead of the other mirrors'",
        [({}, writer.clock_offset())],
    )


def _heartbeat_ages() -> Gauge:
    return Gauge(
        "barnraise_heartbeat_age_seconds",
        "How long ago each background part last advanced",
        [
            *(({"part": part.value}, age) for part, age in heartbeats.read_ages().items()),
            ({"part": "broadcasts"}, watchers.longest_silence()),
        ],
    )


def _measure_queues() -> Gauge:
    lengths = {
        "reports": valkey_client().llen(report_queue.PENDING_KEY),
        "tasks": valkey_client().llen(TASK_QUEUE),
        "webhooks": valkey_client().llen(WEBHOOK_QUEUE),
        "events": LogEvent.objects.filter(accepted=True, understood=False).count(),
        "aggregates": Aggregate.objects.filter(Q(stale=True) | Q(projected=False)).count(),
    }
    return Gauge(
        "barnraise_queue",
        "Waiting items: posted reports, Celery's tasks, events not understood, aggregates to write",
        [({"queue": name}, float(length)) for name, length in lengths.items()],
    )
