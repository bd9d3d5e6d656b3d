"""Run a server in a thread of its own, and call it from other threads."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, wait
from typing import Any, Protocol, TypeVar

log = logging.getLogger("barnraise.exchange")

LOOP_POLL_SECONDS = 0.1  # between two questions whether to stop waiting

Result = TypeVar("Result")


class Server(Protocol):
    """What runs on the thread's event loop."""

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until `stop`; call `ready` once the server listens."""
        ...

    def stop(self) -> None:
        """End `run`."""
        ...


class ServerThread:
    """Own the event loop of a server."""

    def __init__(self, server: Server) -> None:
        """Prepare the thread; `open` starts it."""
        self._server = server
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()  # the transport listens, or the server failed
        self._failure: OSError | None = None

    def open(self) -> None:
        """Start the server unless it runs.

        Raises:
            OSError: When the transport cannot listen.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="barnraise-exchange", daemon=True
            )
            self._thread.start()
            self._ready.wait()
        if self._failure:
            raise self._failure

    def close(self) -> None:
        """Stop the server and wait for its thread. Safe to call twice, or before `open`."""
        if self._thread is not None:
            self.call(self._server.stop)
            self._thread.join()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop, once `open` has started it."""
        assert self._loop is not None
        return self._loop

    def is_alive(self) -> bool:
        """Return whether the server runs."""
        return self._thread is not None and self._thread.is_alive()

    def call(self, function: Callable[..., object], *values: object) -> None:
        """Have the event loop call a function, without waiting; do nothing once it has ended."""
        if self._thread is None:
            self.open()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(function, *values)

    def run(
        self,
        work: Coroutine[Any, Any, Result],
        default: Result,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Result:
        """Run a coroutine on the event loop and wait for its result.

        Args:
            work: The coroutine.
            default: Returned when the server ends first, or when `should_stop` says so.
            should_stop: Called now and then while this waits.
        """
        assert self._loop is not None
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            return default
        while not future.done() and not should_stop():
            wait([future], LOOP_POLL_SECONDS)
        future.cancel()  # without effect on one that is done
        try:
            return future.result()
        except CancelledError:
            return default

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.run(self._ready.set)

        try:
            asyncio.run(serve())
        except Exception as error:
            if self._ready.is_set():  # training must not end with the exchange
                log.critical(
                    "the exchange ended by an error; training goes on alone", exc_info=True
                )
            elif isinstance(error, OSError):
                self._failure = error
            else:
                self._failure = OSError(f"the exchange cannot start: {error}")
        finally:
            self._ready.set()
