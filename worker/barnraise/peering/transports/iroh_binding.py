"""Replace two functions of iroh's Python binding by faster ones. Importing this module does it.

iroh 1.2.0 ships what UniFFI generates. Its copy of bytes and its way of waiting for a result cost
more than all else that an exchange does. Tests in test_iroh_binding.py fail when a newer iroh makes
a replacement needless.
"""

import asyncio
import ctypes
import itertools
import threading
from collections.abc import Callable
from typing import Any

from iroh import iroh_ffi

# So many results that were there at once are taken in a row before the event loop has its turn.
MAX_IMMEDIATE = 16
_READY = iroh_ffi._UNIFFI_RUST_FUTURE_POLL_READY


def write_in_one_copy(self: Any, value: bytes) -> None:
    """Append bytes to iroh's buffer in one copy.

    The generated function copies byte by byte in Python (3 MB/s).
    """
    data = bytes(value)
    with self._reserve(len(data)):
        ctypes.memmove(ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len, data, len(data))


class _Poll:
    """One question to iroh whether a result is there, and its answer.

    Attributes:
        future: Resolved with the answer if it comes later.
        answer: The answer, if it came while the question was asked.
        is_asking: Whether the question is being asked now.
        thread: That asks.
    """

    __slots__ = ("answer", "future", "is_asking", "loop", "thread")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.future: asyncio.Future[int] = loop.create_future()
        self.answer: int | None = None
        self.is_asking = True
        self.thread = threading.get_ident()

    def resolve(self, answer: int) -> None:
        """Resolve the future, on the event loop."""
        if not self.future.done():
            self.future.set_result(answer)


_polls: dict[int, _Poll] = {}
_handles = itertools.count(1)
_immediate_results = itertools.count(1)


@iroh_ffi._UNIFFI_RUST_FUTURE_CONTINUATION_CALLBACK
def _on_answer(handle: int, answer: int) -> None:
    """Receive iroh's answer: in the thread that asks, or later in any other."""
    poll = _polls.pop(handle)
    if poll.is_asking and poll.thread == threading.get_ident():
        poll.answer = answer
    else:
        poll.loop.call_soon_threadsafe(poll.resolve, answer)


async def await_result(
    rust_future: Any,
    ffi_poll: Callable[..., None],
    ffi_complete: Callable[..., Any],
    ffi_free: Callable[..., None],
    lift_func: Callable[[Any], Any],
    error_ffi_converter: Any,
) -> Any:
    """Wait for the result of one of iroh's asynchronous functions.

    The generated function goes through the event loop's queue and wakes its thread for every
    answer, also for one that is there at once: one needless turn of the loop for each write, and
    one more than needed for each read.
    """
    loop = asyncio.get_running_loop()
    has_waited = False
    try:
        while True:
            poll = _Poll(loop)
            handle = next(_handles)
            _polls[handle] = poll
            ffi_poll(rust_future, _on_answer, handle)
            poll.is_asking = False
            answer = poll.answer
            if answer is None:
                has_waited = True
                answer = await poll.future
            if answer == _READY:
                break
        if not has_waited and next(_immediate_results) % MAX_IMMEDIATE == 0:
            await asyncio.sleep(0)  # a peer that sends without end must not stop all others
        return lift_func(
            iroh_ffi._uniffi_rust_call_with_error(error_ffi_converter, ffi_complete, rust_future)
        )
    finally:
        ffi_free(rust_future)


iroh_ffi._UniffiRustBufferBuilder.write = write_in_one_copy
iroh_ffi._uniffi_rust_call_async = await_result
