"""The snapshot that deltas build on."""

import uuid

from django.http import HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_safe

from coordinator.live.picture import snapshot
from coordinator.runs.models import Run


@require_safe
def run_snapshot(request: HttpRequest, run: uuid.UUID) -> JsonResponse:
    found = get_object_or_404(Run.objects.visible_to(request.user), pk=run)
    return JsonResponse(snapshot(found), headers={"Cache-Control": "no-store"})
