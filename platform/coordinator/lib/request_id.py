"""Give each request an id, for its response, the audit log and every log line.

A worker or a proxy may send its own in X-Request-ID; otherwise the site creates one.
"""

import re
from collections.abc import Callable
from contextvars import ContextVar

from django.http import HttpRequest, HttpResponse
from uuid6 import uuid7

HEADER = "X-Request-ID"
VALID = re.compile(r"[0-9A-Za-z._-]{8,64}")
_current: ContextVar[str] = ContextVar("request_id", default="")


def current() -> str:
    """Return the id of the current request or task; "" outside of any."""
    return _current.get()


def enter(request_id: str = "") -> str:
    """Make this the current request; an invalid id is replaced by a new one, which is returned."""
    valid = request_id if VALID.fullmatch(request_id) else uuid7().hex
    _current.set(valid)
    return valid


class RequestIdMiddleware:
    """Enter each request's id, and return it in the response."""

    sync_capable = True
    async_capable = False

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Serve the request under its id."""
        request_id = enter(request.headers.get(HEADER, ""))
        response = self.get_response(request)
        response[HEADER] = request_id
        return response
