"""What the site counts, for Prometheus: counters and times of all processes in one hash of Valkey, and gauges that are
looked up when they are asked for. No label names a machine or a person: a thousand of them are a thousand series.

Counting is never the cause of a failure: with Valkey gone nothing is counted, and everything else goes on.
"""

import logging
import time as clock
from collections.abc import Iterator

import redis.exceptions
from django.db.models import Q
from django.http import HttpRequest, HttpResponse

from coordinator.lib.valkey import valkey_client

log = logging.getLogger("coordinator.lib.counters")

KEY = "metrics"
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
HELP = {
    "barnraise_requests_total": "Requests, by the view that served them and the status they got",
    "barnraise_request_seconds": "How long they took",
    "barnraise_tasks_total": "Celery's tasks, by how they ended: done, retried or failed",
    "barnraise_task_seconds": "How long they took",
    "barnraise_reports_total": "Posts of reports that reached Postgres",
}


def count(name: str, by: int = 1, **labels: str) -> None:
    _add({_series(name, **labels): by})


def time(name: str, seconds: float, **labels: str) -> None:
    """Into a histogram."""
    _add(_timed(name, seconds, **labels))


def _timed(name: str, seconds: float, **labels: str) -> dict[str, float]:
    bucket = next((str(most) for most in BUCKETS if seconds <= most), "+Inf")
    return {
        _series(f"{name}_bucket", **labels, le=bucket): 1,
        _series(f"{name}_sum", **labels): seconds,
    }


def _add(grown: dict[str, float]) -> None:
    try:
        with valkey_client().pipeline(transaction=False) as pipe:
            for series, by in grown.items():
                pipe.hincrby(KEY, series, by) if isinstance(by, int) else pipe.hincrbyfloat(
                    KEY, series, by
                )
            pipe.execute()
    except redis.exceptions.RedisError as error:
        log.debug("not counted: %s", error)


def _series(name: str, **labels: str) -> str:
    """`name{label="value"}`, as Prometheus writes it."""
    told = ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted(labels.items()))
    return f"{name}{{{told}}}" if told else name


def _escaped(value: str) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def exposition() -> str:
    """All of it in Prometheus's text format. Raises RedisError and DatabaseError."""
    kept = {series: float(value) for series, value in valkey_client().hgetall(KEY).items()}
    families: dict[str, dict[str, float]] = {name: {} for name in HELP}
    for series, value in kept.items():
        name = series.partition("{")[0]
        family = name.removesuffix("_bucket").removesuffix("_sum")
        if family in families:
            families[family][series] = value
    lines = []
    for family, found in families.items():
        kind = "histogram" if family.endswith("_seconds") else "counter"
        lines += [f"# HELP {family} {HELP[family]}.", f"# TYPE {family} {kind}"]
        lines += (
            _histogram(family, found)
            if kind == "histogram"
            else [f"{s} {v:g}" for s, v in sorted(found.items())]
        )
    for name, text, values in gauges():
        lines += [
            f"# HELP {name} {text}.",
            f"# TYPE {name} gauge",
            *(f"{s} {v:g}" for s, v in values.items()),
        ]
    return "\n".join(lines) + "\n"


def _histogram(family: str, found: dict[str, float]) -> Iterator[str]:
    """Kept are how many fell into each bucket; told is how many fell into it or a smaller one."""
    sums = {
        s.partition("{")[2].rstrip("}"): v
        for s, v in found.items()
        if s.startswith(f"{family}_sum")
    }
    for labels, total in sorted(sums.items()):
        seen = 0.0
        for le in (*map(str, BUCKETS), "+Inf"):
            # `le` stands where the alphabet puts it among the labels, which is how the series was named
            parts = sorted([*(labels.split(",") if labels else []), f'le="{le}"'])
            seen += found.get(f"{family}_bucket{{{','.join(parts)}}}", 0.0)
            yield f"{family}_bucket{{{','.join(parts)}}} {seen:.17g}"
        told = f"{{{labels}}}" if labels else ""
        yield f"{family}_sum{told} {total:.17g}"
        yield f"{family}_count{told} {seen:.17g}"


def gauges() -> Iterator[tuple[str, str, dict[str, float]]]:
    """(name, help, series → value): looked up now."""
    from django.db.models import Count

    from coordinator.eventlog import writer as events
    from coordinator.eventlog.models import Aggregate, LogEvent
    from coordinator.fleet.models import Membership
    from coordinator.runs.models import Run, Status
    from coordinator.telemetry import report_queue

    runs = dict(Run.objects.order_by().values_list("status").annotate(Count("pk")))
    by_status = {
        _series("barnraise_runs", status=s.value): float(runs.get(s.value, 0)) for s in Status
    }
    yield "barnraise_runs", "Runs, by where they are in their lives", by_status
    alive = Membership.objects.alive().filter(
        run__status__in=[Status.RECRUITING, Status.TRAINING, Status.PAUSED]
    )
    yield (
        "barnraise_machines_alive",
        "Machines that report, in runs under way",
        {"barnraise_machines_alive": alive.count()},
    )
    yield (
        "barnraise_clock_ahead_seconds",
        "How far this machine's clock is ahead of the other mirrors'",
        {"barnraise_clock_ahead_seconds": events.clock_offset()},
    )
    queues = {
        "reports": valkey_client().llen(report_queue.PENDING_KEY),
        "tasks": valkey_client().llen("celery"),
    }
    queues["events"] = LogEvent.objects.filter(accepted=True, understood=False).count()
    queues["subjects"] = Aggregate.objects.filter(Q(stale=True) | Q(projected=False)).count()
    waiting = {
        _series("barnraise_queue", queue=name): float(length) for name, length in queues.items()
    }
    yield (
        "barnraise_queue",
        "What waits: posts of reports, Celery's tasks, events not understood, what others say to be written",
        waiting,
    )


class Counting:
    """Every request, by the name of its view: the addresses of runs are not series of their own."""

    sync_capable = True
    async_capable = False

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        began = clock.monotonic()
        response = self.get_response(request)
        seconds, match = clock.monotonic() - began, request.resolver_match
        view = (match.view_name or match.url_name or "other") if match else "none"
        request_labels = {
            "view": view,
            "method": request.method if request.method in METHODS else "other",
        }
        total = _series(
            "barnraise_requests_total", **request_labels, status=str(response.status_code)
        )
        _add({total: 1, **_timed("barnraise_request_seconds", seconds, view=view)})  # in one trip
        extra = {
            "method": request.method,
            "path": request.path[:200],
            "status": response.status_code,
        }
        level = (
            logging.WARNING
            if response.status_code >= 500
            else logging.INFO
            if seconds > SLOW
            else logging.DEBUG
        )
        access.log(
            level,
            "%s %s %d in %.0f ms",
            *extra.values(),
            1000 * seconds,
            extra={**extra, "seconds": seconds},
        )
        return response


METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
SLOW = 1.0  # seconds: a slower request is logged even where nobody debugs
access = logging.getLogger("coordinator.access")
