"""Keep a site read-only after it was restored from a backup.

It changes nothing until another mirror has returned the end of its own log.
"""

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

from coordinator.eventlog import writer
from coordinator.lib.exceptions import RestorePendingError
from coordinator.ops import error_pages

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
REPLICATION_PATH = "/api/v1/mirrors/"  # requests between mirrors are what ends the wait


class ReadOnlyMiddleware:
    """Answer 503 to requests that would change something while a restore is pending."""

    sync_capable = True
    async_capable = False

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response
        # Final once it is true: a restored database is only served by processes started later.
        self._is_writable = False

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Serve the request if it changes nothing or the site is writable."""
        allowed = request.method in SAFE_METHODS or request.path.startswith(REPLICATION_PATH)
        if self._is_writable or allowed:
            return self.get_response(request)
        self._is_writable = not writer.is_restore_pending()
        if self._is_writable:
            return self.get_response(request)
        return error_pages.error_response(request, 503, RestorePendingError.sentence)
