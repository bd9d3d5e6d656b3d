"""The snapshot that deltas build on, and what is fetched only by who wants to see it."""

import uuid

from django.core.cache import cache
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_safe

from coordinator.live.cross_site import visitor_and_headers
from coordinator.live.snapshot_cache import snapshot_cache
from coordinator.runs.models import Run
from coordinator.telemetry.history import lines

LINES_SECONDS = 5  # that machines' lines are as good as new


@require_safe
def get_snapshot(request: HttpRequest, run: uuid.UUID) -> HttpResponse:
    person, headers = visitor_and_headers(request)
    found = get_object_or_404(Run.objects.visible_to(person), pk=run)
    return HttpResponse(snapshot_cache.get(found), content_type="application/json", headers=headers)


@require_safe
def get_worker_curves(request: HttpRequest, run: uuid.UUID) -> JsonResponse:
    """What each of a few machines measured in training."""
    person, headers = visitor_and_headers(request)
    found = get_object_or_404(Run.objects.visible_to(person), pk=run)
    key = f"live:{run}:lines"
    told = cache.get(key)
    if told is None:
        told = lines(found)
        cache.set(key, told, LINES_SECONDS)
    return JsonResponse({"machines": told}, headers=headers)
