"""HTTP servers on this machine that stand in for sites, mirrors, hubs and proxies."""

import socket
import ssl
import threading
import weakref
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietHandler(BaseHTTPRequestHandler):
    """Handle requests, and log none of them."""

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_port = True  # with the socket that reserves the port


class LocalServer:
    """Serve HTTP at one port of 127.0.0.1.

    A socket that never listens reserves the port for as long as this object lives. While the server
    is closed, connections are refused: otherwise a server of another test process could get the
    port, and answer in the place of one that a test believes to be gone.
    """

    def __init__(self, handler: type[QuietHandler], context: ssl.SSLContext | None = None):
        """Reserve a port and open the server; `context` makes it one of HTTPS."""
        self._handler = handler
        self._context = context
        self._server: _Server | None = None
        reservation = socket.socket()
        reuse = getattr(socket, "SO_REUSEPORT", socket.SO_REUSEADDR)  # Windows has the latter
        reservation.setsockopt(socket.SOL_SOCKET, reuse, 1)
        reservation.bind(("127.0.0.1", 0))
        weakref.finalize(self, reservation.close)
        self.port = reservation.getsockname()[1]
        self.open()

    @property
    def url(self) -> str:
        """Return the server's address."""
        return f"{'https' if self._context else 'http'}://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Serve from now on; the port is the same each time."""
        assert self._server is None
        self._server = _Server(("127.0.0.1", self.port), self._handler)
        if self._context:
            self._server.socket = self._context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def close(self) -> None:
        """Refuse connections from now on. A server that is closed already stays closed."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
