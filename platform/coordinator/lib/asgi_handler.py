"""Serve pages and API as an ASGI application in which one thread handles a whole request."""

import asyncio
import io
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any
from weakref import WeakKeyDictionary

from asgiref.sync import sync_to_async
from asgiref.typing import ASGIReceiveCallable, ASGISendCallable
from django.conf import settings
from django.core import signals
from django.core.exceptions import RequestAborted
from django.core.handlers.asgi import ASGIHandler, get_script_prefix  # pyright: ignore[reportAttributeAccessIssue] - Django's handler, which the stubs know in part
from django.db import close_old_connections
from django.http import FileResponse, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import set_script_prefix

from coordinator.lib.request_delay import request_delay

BUSY_REQUESTS = 4  # running at once in one process; further requests wait
# A request that runs longer no longer counts as busy: it waits for something other than the
# interpreter, as all requests do while Postgres is away.
BUSY_SECONDS = 0.25
# Threads of one process. While Postgres is away each request takes ten seconds to find out, and
# sixteen start in a second.
MAX_THREADS = 400
# A body arrives within this time, and lies on the disk beyond so many bytes: thousands of clients
# that send slowly fill no memory.
BODY_SECONDS = 30.0
BODY_MEMORY_BYTES = 64 << 10


class BodyRefusedError(Exception):
    """A request's body is too large or too slow."""

    def __init__(self, status: int, sentence: str) -> None:
        self.status = status
        self.sentence = sentence
        super().__init__(sentence)


def plain_refusal(request: HttpRequest, status: int, sentence: str) -> HttpResponse:
    """Build an error as plain text."""
    return HttpResponse(sentence, status=status, content_type="text/plain; charset=utf-8")


class BusySlot:
    """Occupy one of the busy slots until the request ends or has run for BUSY_SECONDS."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots: asyncio.Semaphore | None = slots
        self._timer = asyncio.get_running_loop().call_later(BUSY_SECONDS, self.release)

    def release(self) -> None:
        """Release the slot, once."""
        self._timer.cancel()
        if self._slots is not None:
            self._slots.release()
            self._slots = None


class ThreadedHandler(ASGIHandler):
    """Run each request in one thread of a pool, and only a few at once.

    Django's own handler switches to a thread and back three times for each request, and twice more
    for each middleware that can be asynchronous. Our code waits for nothing but Postgres and
    Valkey, in a thread, so one switch is enough. If hundreds of reports and thousands of watchers
    share a process, every switch waits for the event loop. Django also starts a thread for each
    request, for which the loop waits; these threads stay.

    Only a few run at once, because each computing thread keeps the interpreter's lock from the
    event loop for `asgi.SWITCH_SECONDS` whenever the loop needs it. With Python's default of 5 ms
    and twenty busy threads, one turn of the loop took 50 ms, and so did accepting one connection:
    at most twenty were accepted in a second. Waiting requests cost nothing, and a request
    whose client has disconnected is not served.

    A body of more than `settings.DATA_UPLOAD_MAX_MEMORY_SIZE` bytes is refused before anything else
    happens: by its announced length, and otherwise as soon as more has arrived.

    Args:
        build_refusal: Builds the response to a request whose body is refused.
    """

    def __init__(
        self, build_refusal: Callable[[HttpRequest, int, str], HttpResponse] = plain_refusal
    ) -> None:
        super().__init__()
        self._build_refusal = build_refusal
        self._threads = ThreadPoolExecutor(MAX_THREADS, "request")
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    def load_middleware(self, is_async: bool = False) -> None:
        """Load all middleware in its synchronous form."""
        super().load_middleware(is_async=False)  # pyright: ignore[reportCallIssue] - Django's handler, which the stubs know in part

    async def __call__(
        self, scope: dict[str, Any], receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Serve one request."""
        try:
            body = await self._read_bounded_body(scope, receive)
        except RequestAborted:
            return
        except BodyRefusedError as refused:
            response = await self._run_in_thread(self._refuse, scope, refused)
            await self.send_response(response, send)
            return
        # After the body nothing can arrive but the client's disconnection.
        disconnected = asyncio.ensure_future(receive())
        try:
            loop = asyncio.get_running_loop()
            slots = self._slots.setdefault(loop, asyncio.Semaphore(BUSY_REQUESTS))
            waits_since = loop.time()
            await slots.acquire()
            request_delay.record(loop.time() - waits_since)
            slot = BusySlot(slots)
            try:
                if disconnected.done():
                    return
                response = await self._run_in_thread(self._respond, scope, body)
            finally:
                slot.release()
            try:
                await self.send_response(response, send)
            finally:
                if response.streaming:
                    await self._run_in_thread(response.close)
        finally:
            disconnected.cancel()
            body.close()

    async def _read_bounded_body(
        self, scope: dict[str, Any], receive: ASGIReceiveCallable
    ) -> IO[bytes]:
        """Read a body of bounded size in bounded time.

        Raises:
            RequestAborted: The client has disconnected.
            BodyRefusedError: The body is too large, or did not arrive in time.
        """
        limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        too_large = BodyRefusedError(
            413, f"A request may hold at most {limit:,} bytes. Nothing was read or changed."
        )
        announced = dict(scope["headers"]).get(b"content-length", b"")
        if announced.isdigit() and (len(announced) > 18 or int(announced) > limit):
            raise too_large
        # The caller closes a body that is whole.
        body = tempfile.SpooledTemporaryFile(max_size=BODY_MEMORY_BYTES, mode="w+b")  # noqa: SIM115
        is_whole = False
        try:
            async with asyncio.timeout(BODY_SECONDS):
                size = 0
                while not is_whole:
                    message: Any = await receive()
                    if message["type"] == "http.disconnect":
                        raise RequestAborted()
                    size += body.write(message.get("body", b""))
                    if size > limit:
                        raise too_large
                    is_whole = not message.get("more_body", False)
        except TimeoutError:
            raise BodyRefusedError(
                408, f"The request did not arrive within {BODY_SECONDS:.0f} seconds. Try again."
            ) from None
        finally:
            if not is_whole:
                body.close()
        body.seek(0)
        return body

    def _refuse(self, scope: dict[str, Any], refused: BodyRefusedError) -> HttpResponseBase:
        """Build the response to a refused body; the connection ends with it."""
        request, error_response = self.create_request(scope, io.BytesIO())
        response = error_response or self._build_refusal(request, refused.status, refused.sentence)
        response["Connection"] = "close"
        return response

    async def _run_in_thread(self, function: Callable[..., Any], *args: object) -> Any:
        run = sync_to_async(function, thread_sensitive=False, executor=self._threads)
        return await run(*args)

    def _respond(self, scope: dict[str, Any], body: IO[bytes] | io.BytesIO) -> HttpResponseBase:
        """Do all that Django does for a request except sending the response.

        A response that is no stream is closed already. Either way this thread's connection to
        Postgres is free for the next request.
        """
        set_script_prefix(get_script_prefix(scope))
        signals.request_started.send(sender=type(self), scope=scope)
        request, error_response = self.create_request(scope, body)
        response = self.get_response(request) if error_response is None else error_response
        response._handler_class = type(self)  # pyright: ignore[reportAttributeAccessIssue] - Django's handler, which the stubs know in part
        if isinstance(response, FileResponse):
            response.block_size = self.chunk_size
        if response.streaming:  # pyright: ignore[reportAttributeAccessIssue] - Django's handler, which the stubs know in part
            close_old_connections()
        else:
            response.close()
        return response
