"""Keep a site read-only after it was restored from a backup.

It changes nothing until another mirror has returned the end of its own log.
"""

from django.http import HttpRequest, HttpResponse

from coordinator.eventlog import writer
from coordinator.lib.exceptions import RestorePendingError
from coordinator.lib.middleware import GetResponse
from coordinator.ops import error_pages

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
REPLICATION_PATH = "/api/v1/mirrors/"  # requests between mirrors are what ends the wait


def refuse_writes_during_restore(get_response: GetResponse) -> GetResponse:
    """Return a middleware that answers 503 to what would change something during a restore."""
    # Final once it is true: a restored database is only served by processes started later.
    is_writable = False

    def serve(request: HttpRequest) -> HttpResponse:
        nonlocal is_writable
        is_allowed = request.method in SAFE_METHODS or request.path.startswith(REPLICATION_PATH)
        if not is_allowed and not is_writable:
            is_writable = not writer.is_restore_pending()
        if is_allowed or is_writable:
            return get_response(request)
        return error_pages.error_response(request, 503, RestorePendingError.sentence)

    return serve
