"""Answer operators: is this process alive, can it serve, what does it count, how far are its logs.

/healthz, /readyz and /metrics are for the inside: a proxy should not pass them on, and with
BARNRAISE_METRICS_TOKEN set, /metrics requires that token. /status is public.
"""

import secrets

import redis.exceptions
from django.conf import settings
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from django.views.decorators.vary import vary_on_headers

from coordinator.eventlog import writer
from coordinator.eventlog.projection import state_hash
from coordinator.lib import counters, heartbeats, site_identity
from coordinator.lib.middleware import GetResponse, sync_middleware
from coordinator.lib.schema_comparison import describe_schema_problem
from coordinator.lib.valkey import valkey_client
from coordinator.live.broadcaster import watchers
from coordinator.ops import gauges, status_page
from coordinator.replication import pull

STOPPED_SENTENCES = {
    heartbeats.Part.SCHEDULE: "beat has not looked for due tasks",
    heartbeats.Part.REPORTS: "Celery has moved no reports into Postgres",
    heartbeats.Part.EVENTS: "Celery has applied no events of other mirrors",
}
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@sync_middleware
def accept_any_host(request: HttpRequest, get_response: GetResponse) -> HttpResponse:
    """Let load balancers and Prometheus, which name a machine's address, ask for its health."""
    if request.path in settings.INSIDE_PATHS:
        request.META["HTTP_HOST"] = settings.ALLOWED_HOSTS[0].lstrip("*.") or "localhost"
    return get_response(request)


@require_safe
@never_cache
def healthz(request: HttpRequest) -> HttpResponse:
    """Answer without asking Postgres or Valkey: restarting this process would not repair them."""
    return HttpResponse("ok\n", content_type="text/plain")


@require_safe
@never_cache
def readyz(request: HttpRequest) -> JsonResponse:
    """Answer 200 if the servers answer and the background parts advance; else 503 and why."""
    checks = {
        "database": _check_database(),
        "valkey": _check_valkey(),
        "background": _check_background(),
        "broadcasts": _check_broadcasts(),
    }
    ready = all(result == "ok" for result in checks.values())
    return JsonResponse({"ready": ready, **checks}, status=200 if ready else 503)


@require_safe
@never_cache
def metrics(request: HttpRequest) -> HttpResponse:
    """Serve counters and gauges to Prometheus."""
    token = settings.METRICS_TOKEN
    presented = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
    if token and not secrets.compare_digest(presented, token.encode()):
        return HttpResponse(
            "send the token of BARNRAISE_METRICS_TOKEN\n", status=401, content_type="text/plain"
        )
    try:
        text = "\n".join([*counters.exposition(), *gauges.exposition()]) + "\n"
    except (redis.exceptions.RedisError, DatabaseError) as error:
        text = f"metrics are not available: {type(error).__name__}\n"
        return HttpResponse(text, status=503, content_type=PROMETHEUS_TEXT)
    return HttpResponse(text, content_type=PROMETHEUS_TEXT)


@require_safe
@never_cache
@vary_on_headers("Accept")
def status(request: HttpRequest) -> HttpResponse:
    """Describe this mirror's logs and state; mirrors with one state hash agree on everything.

    A browser gets a page, everything else JSON.
    """
    if request.get_preferred_type(["application/json", "text/html"]) == "text/html":
        return render(request, "status.html", status_page.describe_site())
    heads = {
        origin: {"seq": seq, "digest": digest}
        for origin, (seq, digest) in sorted(writer.log_heads().items())
    }
    return JsonResponse(
        {
            **site_identity.mirror_view().model_dump(),
            "state": state_hash(),
            "heads": heads,
            "mirrors": pull.peer_summaries(),
        }
    )


def _check_database() -> str:
    try:
        return describe_schema_problem() or "ok"
    except DatabaseError:
        return "does not answer"


def _check_background() -> str:
    try:
        stopped = heartbeats.stopped_parts()
    except redis.exceptions.RedisError:
        return "unknown: Valkey does not answer"
    return (
        "; ".join(
            f"{STOPPED_SENTENCES[part]} for {seconds:.0f} s" for part, seconds in stopped.items()
        )
        or "ok"
    )


def _check_broadcasts() -> str:
    seconds = watchers.longest_silence()
    if seconds > heartbeats.STOPPED_SECONDS:
        return f"a run's watchers have received nothing for {seconds:.0f} s"
    return "ok"


def _check_valkey() -> str:
    try:
        valkey_client().ping()
    except redis.exceptions.RedisError:
        return "does not answer"
    return "ok"
