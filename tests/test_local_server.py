"""Test the HTTP server of the tests that stand in for sites, mirrors and hubs."""

import socket
from http.server import HTTPServer
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from helpers.network.local_server import LocalServer, QuietHandler


class Handler(QuietHandler):
    """Answer each request with nothing."""

    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()


def test_closed_server_refuses_connections_and_its_port_stays_reserved():
    server = LocalServer(Handler)
    for _ in range(3):
        with urlopen(server.url, timeout=20) as answer:
            assert answer.status == 204
        server.close()
        with pytest.raises(URLError, match="refused"):
            urlopen(server.url, timeout=20)
        with pytest.raises(OSError, match="in use"):
            HTTPServer(("127.0.0.1", server.port), Handler)
        server.open()
    server.close()
    server.close()


def test_port_is_free_once_the_server_is_dropped():
    server = LocalServer(Handler)
    port = server.port
    server.close()
    del server
    with socket.create_server(("127.0.0.1", port)):
        pass
