"""A site that was restored from a backup is looked at, and changes nothing until another mirror gave back its own last
decisions."""

from django.http import HttpRequest, HttpResponse

from coordinator.eventlog import writer
from coordinator.ops import error_pages

SAFE = ("GET", "HEAD", "OPTIONS")
BETWEEN = "/api/v1/mirrors/"  # what mirrors ask each other is how it ends


class ReadOnly:
    sync_capable = True
    async_capable = False

    def __init__(self, get_response):
        self.get_response = get_response
        self._free = False  # for good, once it is: what was restored is served by processes that start after it

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if self._free or request.method in SAFE or request.path.startswith(BETWEEN):
            return self.get_response(request)
        self._free = not writer.is_restore_pending()
        return (
            self.get_response(request)
            if self._free
            else error_pages.error_response(request, 503, writer.RestorePendingError.sentence)
        )
