"""Bound the headers of HTTP requests in size, in time and in number.

uvicorn waits for the rest of a header for ever, and stores as much of one as a client sends. A
proxy in front bounds both; a site without a proxy does it here: `uvicorn --http
coordinator.lib.http_protocol:BoundedHttpProtocol`. `asgi_handler` bounds the bodies.
"""

import asyncio
from collections import defaultdict
from typing import Any, ClassVar

from django.conf import settings
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from barnraise.protocol.ip_addresses import parse_ip
from coordinator.lib.subscriber_network import subscriber_network

HEADER_SECONDS = 20.0  # in which the whole header of a request must arrive
MAX_HEADER_BYTES = 64 << 10
# Connections of one network that have not sent a whole header. A browser has none for longer than
# a round trip, and a proxy sends whole headers at once.
MAX_WAITING = 256
TOO_SLOW = (408, "Request Timeout", "The request's header did not arrive in time. Try again.")
TOO_LARGE = (431, "Request Header Fields Too Large", "The request's header is too large.")


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection, which ends if it sends a request's header too slowly or too much of one.

    Beyond `MAX_WAITING` connections of a network the one that has waited longest ends.
    """

    _waiting: ClassVar[dict[str, dict["BoundedHttpProtocol", None]]] = defaultdict(dict)

    _deadline: asyncio.TimerHandle | None = None  # while a header is awaited
    _header_bytes = 0
    _network = ""  # "" for proxies and programs of this machine, whose connections are not counted

    @classmethod
    def count_waiting(cls) -> int:
        """Return how many counted connections of this process have sent no whole header."""
        return sum(map(len, cls._waiting.values()))

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn itself narrows it
        """Accept a connection, and wait for the header of its first request."""
        super().connection_made(transport)
        self._network = counted_network(self.client[0] if self.client else "")
        self._start_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection that has ended."""
        self._end_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived, and refuse a header that is too large."""
        if self._deadline is None and self._is_idle():
            self._start_waiting()
        super().data_received(data)
        if self._deadline is not None:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(*TOO_LARGE)

    def on_headers_complete(self) -> None:
        """Serve a request whose header is whole."""
        self._end_waiting()
        super().on_headers_complete()

    def _is_idle(self) -> bool:
        """Return whether no request of this connection is being served."""
        return self.cycle is None or self.cycle.response_complete

    def _start_waiting(self) -> None:
        self._header_bytes = 0
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._refuse, *TOO_SLOW)
        if not self._network:
            return
        waiting = self._waiting[self._network]
        waiting[self] = None
        if len(waiting) > MAX_WAITING:
            next(iter(waiting))._refuse(*TOO_SLOW)

    def _end_waiting(self) -> None:
        if self._deadline is None:
            return
        self._deadline.cancel()
        self._deadline = None
        waiting = self._waiting.get(self._network, {})
        waiting.pop(self, None)
        if not waiting:
            self._waiting.pop(self._network, None)

    def _refuse(self, status: int, phrase: str, sentence: str) -> None:
        """Send an error and close the connection.

        A connection that has sent nothing is closed without a word: browsers open some in advance,
        and would take the error for the answer to their next request.
        """
        self._end_waiting()
        if self.transport.is_closing():
            return
        if not self._header_bytes:
            self.transport.close()
            return
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
            f"content-length: {len(sentence)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write((head + sentence).encode())
        self.transport.close()


def counted_network(client: str) -> str:
    """Return the network by which a client's connections are counted; "" where they are not.

    Args:
        client: The address of the other end; "" for a Unix socket.
    """
    try:
        address: Any = parse_ip(client)
    except ValueError:
        return ""
    if address.is_loopback or any(address in network for network in settings.PROXIES):
        return ""
    return subscriber_network(client)
