"""The snapshot that deltas build on."""

import uuid

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_safe

from coordinator.live.snapshots import snapshots
from coordinator.runs.models import Run


@require_safe
def run_snapshot(request: HttpRequest, run: uuid.UUID) -> HttpResponse:
    found = get_object_or_404(Run.objects.visible_to(request.user), pk=run)
    headers = {"Cache-Control": "no-store"}
    return HttpResponse(snapshots.of(found), content_type="application/json", headers=headers)
