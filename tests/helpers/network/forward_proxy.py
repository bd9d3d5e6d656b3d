"""An HTTP proxy as companies run it: it passes requests on, and leads all names to this machine."""

import select
import socket
from http.client import HTTPConnection
from urllib.parse import urlsplit

from helpers.network.local_server import LocalServer, QuietHandler


class ForwardProxy:
    """A proxy on a thread.

    Attributes:
        targets: "METHOD host:port" of each request, in order.
    """

    def __init__(self) -> None:
        self.targets: list[str] = []
        proxy = self

        class Handler(QuietHandler):
            def do_CONNECT(self) -> None:
                proxy.targets.append(f"CONNECT {self.path}")
                port = int(self.path.rpartition(":")[2])
                with socket.create_connection(("127.0.0.1", port)) as upstream:
                    self.send_response(200)
                    self.end_headers()
                    pass_on(self.connection, upstream)
                self.close_connection = True

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                proxy.targets.append(f"{self.command} {parts.netloc}")
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                upstream = HTTPConnection("127.0.0.1", parts.port or 80)
                path = parts._replace(scheme="", netloc="").geturl()
                upstream.request(self.command, path, body, dict(self.headers))
                answer = upstream.getresponse()
                content = answer.read()
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                upstream.close()

            do_POST = do_GET

        self._server = LocalServer(Handler)
        self.url = self._server.url

    def close(self) -> None:
        """Stop listening."""
        self._server.close()


def pass_on(one: socket.socket, other: socket.socket) -> None:
    """Copy bytes both ways until either side closes."""
    while True:
        ready, _, _ = select.select([one, other], [], [], 60)
        if not ready:
            return
        for source in ready:
            data = source.recv(1 << 16)
            if not data:
                return
            (other if source is one else one).sendall(data)
