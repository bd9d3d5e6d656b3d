"""End a request whose answer takes too long, whatever arrives of it meanwhile.

httpx limits the seconds between two pieces of an answer. A server that sends a byte of its header
every few seconds would hold a client for ever.
"""

import contextlib
import socket
import threading
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

# How the names of httpcore's events end at which a connection, plain or with TLS, is there. The
# handshake of TLS is bounded as a whole by the time for one piece.
_CONNECTED = ("connect_tcp.complete", "start_tls.complete")


@dataclass
class LimitedRequest:
    """A request that has a deadline."""

    has_timed_out: bool = False  # whether it took longer and was ended


class AnswerDeadline:
    """The time that a client has for each of its requests.

    A request that takes longer ends with all others that the client makes at the same time: they
    are for the same slow server.
    """

    def __init__(self, seconds: float) -> None:
        """Limit nothing yet; a whole answer may take `seconds`."""
        self._seconds = seconds
        self._streams: WeakSet[Any] = WeakSet()  # httpcore's, of the client's connections
        self._lock = threading.Lock()

    def remember_connection(self, event: str, info: dict[str, Any]) -> None:
        """Receive what a connection does: the `trace` extension of a request."""
        if event.endswith(_CONNECTED):
            with self._lock:
                self._streams.add(info["return_value"])

    @contextlib.contextmanager
    def limit(self) -> Generator[LimitedRequest]:
        """Limit what is done inside to the seconds of this deadline.

        When they have passed, reading from the connection raises an error of httpx or returns
        nothing.
        """
        request = LimitedRequest()
        timer = threading.Timer(self._seconds, self._end, [request])
        timer.daemon = True
        timer.start()
        try:
            yield request
        finally:
            timer.cancel()

    def _end(self, request: LimitedRequest) -> None:
        request.has_timed_out = True
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            # A thread that waits for the other side wakes up at a shutdown, not at a close. That
            # of an `SSLSocket` would also change what the other thread is using.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(stream.get_extra_info("socket"), socket.SHUT_RDWR)
