"""Test how many requests one process runs at once, and which wait."""

import asyncio
import gc
import threading
import time

import pytest
from asgiref.testing import ApplicationCommunicator
from django.conf import settings
from django.http import HttpResponse

from coordinator.asgi import GC_THRESHOLD, application
from coordinator.lib import asgi_handler
from coordinator.lib.asgi_handler import BUSY_REQUESTS, ThreadedHandler

MANY = 5 * BUSY_REQUESTS
SCOPE = {
    "type": "http",
    "method": "GET",
    "path": "/",
    "headers": [(b"host", b"localhost")],
    "query_string": b"",
}


class SlowHandler(ThreadedHandler):
    """Answer once `open` is set, and count the requests that wait for it."""

    def __init__(self):
        super().__init__()
        self.open = threading.Event()
        self._lock = threading.Lock()
        self.running = 0
        self.max_running = 0
        self.served = 0

    def get_response(self, request):
        with self._lock:
            self.running += 1
            self.served += 1
            self.max_running = max(self.max_running, self.running)
        assert self.open.wait(20)
        with self._lock:
            self.running -= 1
        return HttpResponse("done")


async def send_request(site: ThreadedHandler) -> ApplicationCommunicator:
    """Send one request and return its client."""
    browser = ApplicationCommunicator(site, dict(SCOPE))
    await browser.send_input({"type": "http.request", "body": b""})
    return browser


async def read_status(browser: ApplicationCommunicator) -> int:
    """Return the status of the response."""
    return (await browser.receive_output(20))["status"]


async def send_requests(site: SlowHandler, running: int) -> list[ApplicationCommunicator]:
    """Send MANY requests and wait until exactly `running` of them run."""
    browsers = [await send_request(site) for _ in range(MANY)]
    deadline = time.monotonic() + 20
    while site.running < running:
        assert time.monotonic() < deadline, f"{site.running} of {running} requests run"
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert site.running == running, "more requests run than there are slots"
    return browsers


@pytest.fixture
def long_busy_slots(monkeypatch):
    """Let requests occupy their slots until they end."""
    monkeypatch.setattr(asgi_handler, "BUSY_SECONDS", 20.0)


async def test_few_requests_run_at_once_and_all_are_answered(long_busy_slots):
    site = SlowHandler()
    browsers = await send_requests(site, BUSY_REQUESTS)
    site.open.set()
    assert [await read_status(browser) for browser in browsers] == [200] * MANY
    assert site.max_running == BUSY_REQUESTS, "more requests ran than there are slots"
    assert site.served == MANY


async def test_request_that_waits_for_postgres_releases_its_slot(monkeypatch):
    """Let all requests wait at the same time, as they do while Postgres is away."""
    monkeypatch.setattr(asgi_handler, "BUSY_SECONDS", 0.05)
    site = SlowHandler()
    browsers = await send_requests(site, MANY)
    site.open.set()
    assert [await read_status(browser) for browser in browsers] == [200] * MANY
    monkeypatch.setattr(asgi_handler, "BUSY_SECONDS", 20.0)
    site.open.clear()
    # A slot that was released early is not released a second time.
    later_browsers = await send_requests(site, BUSY_REQUESTS)
    site.open.set()
    assert [await read_status(browser) for browser in later_browsers] == [200] * MANY


async def test_disconnected_client_is_not_served(long_busy_slots):
    site = SlowHandler()
    browsers = await send_requests(site, BUSY_REQUESTS)
    for browser in browsers[BUSY_REQUESTS:]:
        await browser.send_input({"type": "http.disconnect"})
    site.open.set()
    assert [await read_status(browser) for browser in browsers[:BUSY_REQUESTS]] == [
        200
    ] * BUSY_REQUESTS
    for browser in browsers[BUSY_REQUESTS:]:
        await browser.wait(20)
    assert site.served == BUSY_REQUESTS


async def test_failed_request_releases_its_slot(long_busy_slots):
    class Broken(ThreadedHandler):
        def get_response(self, request):
            raise RuntimeError("this request fails")

    site = Broken()
    for _ in range(2 * BUSY_REQUESTS):
        browser = await send_request(site)
        with pytest.raises(RuntimeError, match="this request fails"):
            await browser.wait(20)


@pytest.mark.django_db(transaction=True)  # A process compares its keys with the database's first.
async def test_collector_ignores_objects_that_exist_at_the_start():
    before = gc.get_threshold()
    server = ApplicationCommunicator(application, {"type": "lifespan", "asgi": {"version": "3.0"}})
    try:
        await server.send_input({"type": "lifespan.startup"})
        assert await server.receive_output(20) == {"type": "lifespan.startup.complete"}
        assert gc.get_freeze_count() > 100_000, "Django's objects are not frozen"
        assert gc.get_threshold()[0] == GC_THRESHOLD
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
        server.stop(exceptions=False)


# ---- bodies


class CountingHandler(ThreadedHandler):
    """Answer every request with the size of its body."""

    def get_response(self, request):
        return HttpResponse(str(len(request.body)))


async def post(site: ThreadedHandler, *chunks: bytes, length: str = "") -> tuple[int, int]:
    """Post a body in chunks; return the status and how many chunks were read before it."""
    headers = [(b"host", b"localhost")]
    if length:
        headers.append((b"content-length", length.encode()))
    unread = list(chunks)

    async def receive():
        if unread:
            return {"type": "http.request", "body": unread.pop(0), "more_body": bool(unread)}
        return await asyncio.Event().wait()

    sent = []

    async def send(message):
        sent.append(message)

    await site({**SCOPE, "method": "POST", "path": "/nowhere", "headers": headers}, receive, send)
    return sent[0]["status"], len(chunks) - len(unread)


async def test_body_that_announces_100_gb_is_refused_unread():
    assert await post(CountingHandler(), b"x", length=str(100 << 30)) == (413, 0)
    assert await post(CountingHandler(), b"x", length="9" * 30) == (413, 0)


async def test_body_that_grows_without_end_is_cut_off_as_it_arrives():
    chunk = bytes(64 << 10)
    status, read = await post(CountingHandler(), *[chunk] * 1000)
    assert status == 413
    assert read <= settings.DATA_UPLOAD_MAX_MEMORY_SIZE // len(chunk) + 1
    assert (await post(CountingHandler(), *[chunk] * 1000, length="5"))[0] == 413


async def test_body_that_trickles_is_given_up(monkeypatch):
    monkeypatch.setattr(asgi_handler, "BODY_SECONDS", 0.05)

    async def receive():
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"x", "more_body": True}

    sent = []

    async def send(message):
        sent.append(message)

    await CountingHandler()({**SCOPE, "method": "POST"}, receive, send)
    assert sent[0]["status"] == 408
    assert (b"Connection", b"close") in [tuple(header) for header in sent[0]["headers"]]


async def test_body_of_the_largest_size_is_served():
    body = bytes(settings.DATA_UPLOAD_MAX_MEMORY_SIZE)
    assert await post(CountingHandler(), body, length=str(len(body))) == (200, 1)
