"""The dashboard on the admin's index page, and the fragment that refreshes it."""

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from coordinator.staff.dashboard import collect_dashboard


def dashboard_callback(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """Add the dashboard to the context of Unfold's index page."""
    return {**context, "figures": collect_dashboard()}


@require_safe
def show_dashboard(request: HttpRequest) -> HttpResponse:
    """Render the dashboard alone, for htmx."""
    return render(request, "admin/dashboard.html", {"figures": collect_dashboard()})
