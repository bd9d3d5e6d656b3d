"""What those who run the site ask it: /healthz, is this process alive; /readyz, can it serve; /metrics, what it counts;
and what anybody may: /status, how far it has come in the logs that mirrors share.

The first three are for the inside: a proxy should not pass them on, and with BARNRAISE_METRICS_TOKEN set /metrics wants
to see it.
"""

import secrets

import redis.exceptions
from django.conf import settings
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from coordinator.eventlog import writer
from coordinator.eventlog.projection import state_hash
from coordinator.lib import counters, site_identity
from coordinator.lib.valkey import valkey_client
from coordinator.replication import pull

TEXT = "text/plain; version=0.0.4; charset=utf-8"  # of Prometheus


@require_safe
@never_cache
def healthz(request: HttpRequest) -> HttpResponse:
    """Nothing is asked of others: who restarts this process for their sake would make it worse."""
    return HttpResponse("ok\n", content_type="text/plain")


@require_safe
@never_cache
def readyz(request: HttpRequest) -> JsonResponse:
    """200 when Postgres answers with all migrations in it, and Valkey; else 503, with what is amiss."""
    found = {"database": _database(), "valkey": _valkey()}
    ready = all(state == "ok" for state in found.values())
    return JsonResponse({"ready": ready, **found}, status=200 if ready else 503)


@require_safe
@never_cache
def metrics_page(request: HttpRequest) -> HttpResponse:
    token = settings.METRICS_TOKEN
    shown = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
    if token and not secrets.compare_digest(shown, token.encode()):
        return HttpResponse(
            "show the token of BARNRAISE_METRICS_TOKEN\n", status=401, content_type="text/plain"
        )
    try:
        return HttpResponse(counters.exposition(), content_type=TEXT)
    except (redis.exceptions.RedisError, DatabaseError) as error:
        return HttpResponse(
            f"nothing can be counted just now: {type(error).__name__}\n",
            status=503,
            content_type=TEXT,
        )


@require_safe
@never_cache
def status(request: HttpRequest) -> JsonResponse:
    """Mirrors with one state hash say the same of everything."""
    heads = {
        origin: {"seq": seq, "digest": last}
        for origin, (seq, last) in sorted(writer.log_heads().items())
    }
    said = {"state": state_hash(), "heads": heads, "mirrors": pull.peer_summaries()}
    return JsonResponse({**site_identity.view().model_dump(), **said})


def _database() -> str:
    try:
        executor = MigrationExecutor(connection)
        missing = executor.migration_plan(executor.loader.graph.leaf_nodes())
    except DatabaseError:
        return "does not answer"
    return f"{len(missing)} migrations are not applied: manage.py migrate" if missing else "ok"


def _valkey() -> str:
    try:
        valkey_client().ping()
    except redis.exceptions.RedisError:
        return "does not answer"
    return "ok"
