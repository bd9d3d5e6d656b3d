"""The worker's wheel: its page with version and digest, the file, and its constraints."""

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from coordinator.web.worker_wheel import CONSTRAINTS, find_wheel, read_constraints


@require_safe
def show_downloads(request: HttpRequest) -> HttpResponse:
    """Show how to install the worker, and the wheel's version and digest."""
    context = {"wheel": find_wheel(), "constraints": CONSTRAINTS}
    return render(request, "downloads.html", context)


@require_safe
def send_wheel(request: HttpRequest, name: str) -> HttpResponse:
    """Send the wheel or its constraints; another name, as of an earlier version, is not found."""
    if name == CONSTRAINTS:
        constraints = read_constraints()
        if constraints is None:
            raise Http404
        return HttpResponse(constraints, content_type="text/plain; charset=utf-8")
    wheel = find_wheel()
    if wheel is None or wheel.name != name:
        raise Http404
    response = HttpResponse(wheel.path.read_bytes(), content_type="application/octet-stream")
    response["Content-Disposition"] = f'attachment; filename="{wheel.name}"'
    response["ETag"] = f'"{wheel.sha256}"'
    return response
