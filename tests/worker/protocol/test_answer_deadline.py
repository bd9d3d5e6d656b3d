"""A client's requests end in bounded time, whatever a server sends meanwhile."""

import socket
import threading
import time

import pytest

from barnraise.protocol.coordinator_messages import MirrorView
from barnraise.protocol.signed_http import (
    TOO_SLOW,
    HttpOptions,
    RequestFailedError,
    SignedHttpClient,
)
from barnraise.protocol.signing import Identity


class TricklingServer(threading.Thread):
    """A server that sends a byte of its answer every 20 ms, on each connection."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(daemon=True)
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.start()

    def run(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._trickle, args=[connection], daemon=True).start()

    def _trickle(self, connection: socket.socket) -> None:
        with connection:
            connection.recv(1 << 16)
            try:
                for byte in self._answer:
                    connection.send(bytes([byte]))
                    time.sleep(0.02)
            except OSError:
                return


def make_client(port: int, seconds: float) -> SignedHttpClient:
    """Return a client with a deadline for each answer."""
    options = HttpOptions(timeout_seconds=5.0, max_seconds=seconds)
    url = f"http://127.0.0.1:{port}"
    return SignedHttpClient(url, Identity(b"i" * 32), name="the slow one", options=options)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nx-header: " + b"h" * 10_000,
        b"HTTP/1.1 200 OK\r\ncontent-length: 10000\r\n\r\n" + b" " * 10_000,
    ],
    ids=["header", "body"],
)
def test_server_that_trickles_is_cut_off_in_time(answer):
    client = make_client(TricklingServer(answer).port, 0.4)
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(RequestFailedError, match=r"takes more than 0\.4 seconds") as caught:
            client.request("GET", "/mirror", None, MirrorView)
        assert time.monotonic() - started < 3
        assert caught.value.status == TOO_SLOW
    client.close()


def test_request_that_ends_in_time_is_not_cut_off():
    server = TricklingServer(b"HTTP/1.1 404 NO\r\ncontent-length: 2\r\n\r\n{}")
    client = make_client(server.port, 30.0)
    with pytest.raises(RequestFailedError, match="not Barnraise's API") as caught:
        client.request("GET", "/mirror", None, MirrorView)
    assert caught.value.status == 404
    client.close()
