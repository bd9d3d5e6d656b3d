"""Give each request an id, for its response, the audit log and every log line.

A worker or a proxy may send its own in X-Request-ID; otherwise the site creates one.
"""

import re
from contextvars import ContextVar

from django.http import HttpRequest, HttpResponse
from uuid6 import uuid7

from coordinator.lib.middleware import GetResponse, sync_middleware

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


@sync_middleware
def set_request_id(request: HttpRequest, get_response: GetResponse) -> HttpResponse:
    """Serve a request under its id, and return the id in the response."""
    request_id = enter(request.headers.get(HEADER, ""))
    response = get_response(request)
    response[HEADER] = request_id
    return response
