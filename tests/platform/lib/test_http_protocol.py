"""Headers of requests are bounded in size, in time and in number, before anything is served."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from ipaddress import ip_network

import pytest
import uvicorn

from coordinator.lib import http_protocol
from coordinator.lib.http_protocol import BoundedHttpProtocol, counted_network

REQUEST = b"GET / HTTP/1.1\r\nhost: barn\r\n\r\n"


async def echo(scope, receive, send) -> None:
    """Answer with the request's path and the bytes of its body."""
    assert scope["type"] == "http"
    body = await receive()
    text = f"{scope['path']} {len(body['body'])}".encode()
    headers = [(b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


@contextlib.asynccontextmanager
async def serve() -> AsyncIterator[int]:
    """Run uvicorn with the protocol; yield its port."""
    config = uvicorn.Config(
        echo, port=0, http=BoundedHttpProtocol, log_level="error", lifespan="off"
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task
    assert BoundedHttpProtocol.count_waiting() == 0


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """Read until the server closes the connection."""
    return await asyncio.wait_for(reader.read(), 10)


async def test_slow_header_ends_the_connection(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEADER_SECONDS", 0.3)
    async with serve() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for byte in (b"GET / HTTP/1.1\r\n", b"host: ", b"b"):
            writer.write(byte)
            await asyncio.sleep(0.05)
        answer = await read_answer(reader)
        assert answer.startswith(b"HTTP/1.1 408") and answer.endswith(b"in time. Try again.")
        # A browser may have opened it in advance, and would take an error for its next answer.
        silent, _ = await asyncio.open_connection("127.0.0.1", port)
        assert await read_answer(silent) == b""


async def test_connection_without_a_new_request_ends_whatever_it_sends(monkeypatch):
    """Line ends between requests begin none, and end uvicorn's own wait for the next one."""
    monkeypatch.setattr(http_protocol, "HEADER_SECONDS", 1.0)  # the request must arrive in time
    async with serve() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        assert (await reader.readuntil(b"/ 0")).startswith(b"HTTP/1.1 200")
        writer.write(b"\r\n")
        assert (await read_answer(reader)).startswith(b"HTTP/1.1 408")


async def test_large_header_is_refused_before_it_is_whole():
    async with serve() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: barn\r\nx: ")
        for _ in range(http_protocol.MAX_HEADER_BYTES // 4096):
            writer.write(b"a" * 4096)
        assert (await read_answer(reader)).startswith(b"HTTP/1.1 431")


async def test_requests_and_bodies_are_served_as_before():
    async with serve() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(REQUEST)
            assert (await reader.readuntil(b"/ 0")).startswith(b"HTTP/1.1 200")
        body = b"b" * (http_protocol.MAX_HEADER_BYTES * 2)
        writer.write(b"POST /p HTTP/1.1\r\nhost: barn\r\ncontent-length: %d\r\n\r\n" % len(body))
        writer.write(body)
        assert (await reader.readuntil(b"/p ")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_oldest_waiting_connection_of_a_network_makes_room(monkeypatch):
    monkeypatch.setattr(http_protocol, "MAX_WAITING", 2)
    monkeypatch.setattr(http_protocol, "counted_network", lambda client: "a network")
    async with serve() as port:
        first, *others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert await read_answer(first[0]) == b""
        for reader, writer in others:
            writer.write(REQUEST)
            assert (await reader.readuntil(b"/ 0")).startswith(b"HTTP/1.1 200")
            writer.close()


@pytest.mark.parametrize(
    ("client", "network"),
    [
        ("", ""),
        ("127.0.0.1", ""),
        ("::1", ""),
        ("10.1.2.3", ""),
        ("203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
    ],
)
def test_connections_of_proxies_and_of_this_machine_are_not_counted(settings, client, network):
    settings.PROXIES = [ip_network("10.0.0.0/8")]
    assert counted_network(client) == network
