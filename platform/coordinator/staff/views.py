"""The admin's first page, and the part of it that comes again every few seconds."""

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from coordinator.staff.dashboard import collect_dashboard


def dashboard_callback(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """Unfold asks for what the index shows beyond its list of models."""
    return {**context, "figures": collect_dashboard()}


@require_safe
def show_dashboard(request: HttpRequest) -> HttpResponse:
    return render(request, "admin/dashboard.html", {"figures": collect_dashboard()})
