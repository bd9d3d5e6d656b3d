"""The worker's wheel: its page with version and digest, and the file."""

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from coordinator.web.worker_wheel import find_wheel


@require_safe
def show_downloads(request: HttpRequest) -> HttpResponse:
    """Show how to install the worker, and the wheel's version and digest."""
    return render(request, "downloads.html", {"wheel": find_wheel()})


@require_safe
def send_wheel(request: HttpRequest, name: str) -> HttpResponse:
    """Send the wheel; another name, such as that of an earlier version, is not found."""
    wheel = find_wheel()
    if wheel is None or wheel.name != name:
        raise Http404
    response = HttpResponse(wheel.path.read_bytes(), content_type="application/octet-stream")
    response["Content-Disposition"] = f'attachment; filename="{wheel.name}"'
    response["ETag"] = f'"{wheel.sha256}"'
    return response
