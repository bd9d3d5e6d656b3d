"""Count requests, tasks and reports for Prometheus, in one hash of Valkey for all processes.

No label names a machine or a person: a thousand of them would be a thousand series. Counting is
never the cause of a failure: without Valkey nothing is counted, and everything else goes on.
"""

import logging
import time
from collections.abc import Iterator

import redis.exceptions
from django.http import HttpRequest, HttpResponse

from coordinator.lib.log_format import describe_path
from coordinator.lib.middleware import GetResponse, sync_middleware
from coordinator.lib.valkey import valkey_client

log = logging.getLogger("coordinator.lib.counters")
access_log = logging.getLogger("coordinator.access")

KEY = "metrics"  # of the hash: series → value
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
HELP = {
    "barnraise_requests_total": "Requests, by the view that served them and the status they got",
    "barnraise_request_seconds": "Duration of requests",
    "barnraise_tasks_total": "Celery's tasks, by outcome: done, retried, failed or held",
    "barnraise_task_seconds": "Duration of tasks",
    "barnraise_reports_total": "Posts of reports that reached Postgres",
    "barnraise_restarts_total": "Processes that the embedded stack's supervisor started again",
}
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
SLOW_SECONDS = 1.0  # a slower request is logged even without debugging


def increment(name: str, by: int = 1, **labels: str) -> None:
    """Add to a counter."""
    _add({series_name(name, **labels): by})


def observe(name: str, seconds: float, **labels: str) -> None:
    """Add a duration to a histogram."""
    _add(_histogram_buckets(name, seconds, **labels))


def _histogram_buckets(name: str, seconds: float, **labels: str) -> dict[str, float]:
    bucket = next((str(bound) for bound in BUCKETS if seconds <= bound), "+Inf")
    return {
        series_name(f"{name}_bucket", **labels, le=bucket): 1,
        series_name(f"{name}_sum", **labels): seconds,
    }


def _add(increments: dict[str, float]) -> None:
    """Add to several series in one round trip."""
    try:
        with valkey_client().pipeline(transaction=False) as pipe:
            for series, by in increments.items():
                if isinstance(by, int):
                    pipe.hincrby(KEY, series, by)
                else:
                    pipe.hincrbyfloat(KEY, series, by)
            pipe.execute()
    except redis.exceptions.RedisError as error:
        log.debug("not counted: %s", error)


def series_name(name: str, **labels: str) -> str:
    """Return `name{label="value"}`, as Prometheus writes it."""
    pairs = ",".join(f'{label}="{_escape(value)}"' for label, value in sorted(labels.items()))
    return f"{name}{{{pairs}}}" if pairs else name


def _escape(value: str) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def exposition() -> Iterator[str]:
    """Yield the lines of all counters and histograms in Prometheus's text format.

    Raises:
        RedisError: Valkey does not answer.
    """
    families: dict[str, dict[str, float]] = {name: {} for name in HELP}
    for key, value in valkey_client().hgetall(KEY).items():
        series = str(key)
        name = series.partition("{")[0]
        family = name.removesuffix("_bucket").removesuffix("_sum")
        if family in families:
            families[family][series] = float(value)
    for family, values in families.items():
        is_histogram = family.endswith("_seconds")
        yield f"# HELP {family} {HELP[family]}."
        yield f"# TYPE {family} {'histogram' if is_histogram else 'counter'}"
        if is_histogram:
            yield from _histogram_lines(family, values)
        else:
            yield from (f"{series} {value:g}" for series, value in sorted(values.items()))


def _histogram_lines(family: str, values: dict[str, float]) -> Iterator[str]:
    """Convert stored counts per bucket to Prometheus's cumulative counts."""
    sums = {
        series.partition("{")[2].rstrip("}"): value
        for series, value in values.items()
        if series.startswith(f"{family}_sum")
    }
    for labels, total in sorted(sums.items()):
        cumulative = 0.0
        for bound in (*map(str, BUCKETS), "+Inf"):
            # Labels are sorted by name in a stored series, so `le` has to be put in its place.
            own_pairs: list[str] = labels.split(",") if labels else []
            pairs = sorted([*own_pairs, f'le="{bound}"'])
            series = f"{family}_bucket{{{','.join(pairs)}}}"
            cumulative += values.get(series, 0.0)
            yield f"{series} {cumulative:.17g}"
        suffix = f"{{{labels}}}" if labels else ""
        yield f"{family}_sum{suffix} {total:.17g}"
        yield f"{family}_count{suffix} {cumulative:.17g}"


@sync_middleware
def count_and_log_request(request: HttpRequest, get_response: GetResponse) -> HttpResponse:
    """Count and log a request by the name of its view, so that a run's address is no series."""
    started = time.monotonic()
    response = get_response(request)
    seconds = time.monotonic() - started
    _count_request(request, response, seconds)
    _log_request(request, response, seconds)
    return response


def _view_name(request: HttpRequest) -> str:
    """Name the view that served the request; "none" if no address matched."""
    match = request.resolver_match
    return (match.view_name or match.url_name or "other") if match else "none"


def _method_label(request: HttpRequest) -> str:
    return request.method if request.method in METHODS else "other"


def _count_request(request: HttpRequest, response: HttpResponse, seconds: float) -> None:
    view = _view_name(request)
    total = series_name(
        "barnraise_requests_total",
        view=view,
        method=_method_label(request),
        status=str(response.status_code),
    )
    _add({total: 1, **_histogram_buckets("barnraise_request_seconds", seconds, view=view)})


def _log_request(request: HttpRequest, response: HttpResponse, seconds: float) -> None:
    fields = {
        "method": _method_label(request),
        "view": _view_name(request),
        "path": describe_path(request),
        "status": response.status_code,
    }
    level = logging.DEBUG
    if response.status_code >= 500:
        level = logging.WARNING
    elif seconds > SLOW_SECONDS:
        level = logging.INFO
    access_log.log(
        level,
        "%s %s %s %d in %.0f ms",
        *fields.values(),
        1000 * seconds,
        extra={**fields, "seconds": seconds},
    )
