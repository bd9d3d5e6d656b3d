"""Pages and API as an ASGI application whose every request runs in one thread from door to door."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

from asgiref.sync import sync_to_async
from django.core import signals
from django.core.exceptions import RequestAborted
from django.core.handlers.asgi import ASGIHandler, get_script_prefix
from django.db import close_old_connections
from django.http import FileResponse
from django.http.response import HttpResponseBase
from django.urls import set_script_prefix

AT_WORK = 4  # requests of one process; the others wait at the door
LONG = 0.25  # seconds after which one that is still at work counts no more: it waits for something else than its turn,
MOST = 400  # as all do while Postgres is gone, for ten seconds each: sixteen a second find out, each in a thread


class Turn:
    """One request's, until it ends it or it was long enough."""

    def __init__(self, turns: asyncio.Semaphore):
        self._turns: asyncio.Semaphore | None = turns
        self._long = asyncio.get_running_loop().call_later(LONG, self.end)

    def end(self) -> None:
        self._long.cancel()
        if self._turns is not None:
            self._turns.release()
            self._turns = None


class Pages(ASGIHandler):
    """Django's own handler goes to a thread and back three times for a request, and twice more for each middleware that
    can be asynchronous. Nothing here waits for more than Postgres and Valkey, in a thread: once does. Where hundreds of
    reports and thousands of watchers share a process, each way there and back waits for its turn. And it begins a
    thread for each request, for which the loop waits; these stay.

    And few threads at once: each that computes keeps the loop from Python's lock for `asgi.SWITCH` whenever it comes
    for it. At Python's own 5 ms, with twenty at work, a turn of the loop took 50 ms, and so did letting one connection
    in: no more than twenty came in a second, whatever they asked for. Who waits at the door costs nothing, and who has
    left it is not served."""

    def __init__(self) -> None:
        super().__init__()
        self._threads = ThreadPoolExecutor(MOST, "request")
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    def load_middleware(self, is_async: bool = False) -> None:
        super().load_middleware(is_async=False)

    async def __call__(self, scope: dict, receive, send) -> None:
        try:
            body = await self.read_body(receive)
        except RequestAborted:
            return
        left = asyncio.ensure_future(receive())  # all that can still come
        try:
            turns = self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(AT_WORK))
            await turns.acquire()
            turn = Turn(turns)
            try:
                if left.done():
                    return
                response = await self._threaded(self._answer, scope, body)
            finally:
                turn.end()
            try:
                await self.send_response(response, send)
            finally:
                if response.streaming:
                    await self._threaded(response.close)
        finally:
            left.cancel()
            body.close()

    async def _threaded(self, what: Callable, *args: object) -> Any:
        return await sync_to_async(what, thread_sensitive=False, executor=self._threads)(*args)

    def _answer(self, scope: dict, body) -> HttpResponseBase:
        """All that Django does for a request but send the answer. One that is not a stream is closed already. Either
        way this thread's connection to Postgres is free for the next."""
        set_script_prefix(get_script_prefix(scope))
        signals.request_started.send(sender=type(self), scope=scope)
        request, refused = self.create_request(scope, body)
        response = self.get_response(request) if refused is None else refused
        response._handler_class = type(self)  # whom Django says has finished
        if isinstance(response, FileResponse):
            response.block_size = self.chunk_size
        if response.streaming:
            close_old_connections()
        else:
            response.close()
        return response
