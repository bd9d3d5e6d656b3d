"""A name for each request, in its answer, in the audit log and wherever it is logged.

A worker or a proxy may send its own in X-Request-ID; else the site makes one.
"""

import re
from contextvars import ContextVar

from django.http import HttpRequest, HttpResponse
from uuid6 import uuid7

HEADER = "X-Request-ID"
SHAPE = re.compile(r"[0-9A-Za-z._-]{8,64}")
_current: ContextVar[str] = ContextVar("request_id", default="")


def current() -> str:
    """Of the request (or the task) at hand; "" outside of any."""
    return _current.get()


def enter(name: str = "") -> str:
    """From here on this is the request at hand: `name` where it is a fit one, else a fresh one."""
    found = name if SHAPE.fullmatch(name) else uuid7().hex
    _current.set(found)
    return found


class RequestId:
    sync_capable = True
    async_capable = False

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        name = enter(request.headers.get(HEADER, ""))
        response = self.get_response(request)
        response[HEADER] = name
        return response
