"""Pages and API as an ASGI application whose every request runs in one thread from door to door."""

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest
from django.http.response import HttpResponseBase


class Pages(ASGIHandler):
    """Django's own handler takes each middleware that can be asynchronous as such, and each then hops to the thread and
    back, twice a request. Nothing here waits for more than Postgres and Valkey, in a thread: one hop does. Where
    hundreds of reports and thousands of watchers share a process, each hop waits its turn."""

    def load_middleware(self, is_async: bool = False) -> None:
        super().load_middleware(is_async=False)

    async def get_response_async(self, request: HttpRequest) -> HttpResponseBase:
        return await sync_to_async(self.get_response, thread_sensitive=True)(request)
