"""Live data over HTTP: the snapshot that deltas build on, and curves that are loaded on demand."""

import uuid

from django.core.cache import cache
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_safe

from coordinator.live.cross_site import visitor_and_headers
from coordinator.live.snapshot_cache import snapshot_cache
from coordinator.runs.models import Run
from coordinator.telemetry.history import load_machine_curves
from coordinator.telemetry.swarm import build_swarm

CURVES_SECONDS = 5  # for which the curves of single machines are cached
SWARM_SECONDS = 3  # for which the graph of the swarm is cached


@require_safe
def get_snapshot(request: HttpRequest, run: uuid.UUID) -> HttpResponse:
    """Return a run's snapshot as JSON."""
    visitor, headers = visitor_and_headers(request)
    visible_run = get_object_or_404(Run.objects.visible_to(visitor), pk=run)
    return HttpResponse(
        snapshot_cache.get(visible_run), content_type="application/json", headers=headers
    )


@require_safe
def get_worker_curves(request: HttpRequest, run: uuid.UUID) -> JsonResponse:
    """Return the training loss curves of a few machines, those that trained most."""
    visitor, headers = visitor_and_headers(request)
    visible_run = get_object_or_404(Run.objects.visible_to(visitor), pk=run)
    curves = cache.get_or_set(
        f"live:{run}:curves", lambda: load_machine_curves(visible_run), CURVES_SECONDS
    )
    return JsonResponse({"machines": curves}, headers=headers)


@require_safe
def get_swarm(request: HttpRequest, run: uuid.UUID) -> JsonResponse:
    """Return the machines of a run with their connections."""
    visitor, headers = visitor_and_headers(request)
    visible_run = get_object_or_404(Run.objects.visible_to(visitor), pk=run)
    swarm = cache.get_or_set(f"live:{run}:swarm", lambda: build_swarm(visible_run), SWARM_SECONDS)
    return JsonResponse(swarm, headers=headers)
