"""Test how many requests one process runs at once, and which wait."""

import asyncio
import gc
import threading
import time

import pytest
from asgiref.testing import ApplicationCommunicator
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


class Slow(ThreadedHandler):
    """Answers once `open` is set, and notes how many wait for that at once."""

    def __init__(self):
        super().__init__()
        self.open, self._lock = threading.Event(), threading.Lock()
        self.inside = self.most = self.served = 0

    def get_response(self, request):
        with self._lock:
            self.inside, self.served = self.inside + 1, self.served + 1
            self.most = max(self.most, self.inside)
        assert self.open.wait(20)
        with self._lock:
            self.inside -= 1
        return HttpResponse("done")


async def come(site: ThreadedHandler) -> ApplicationCommunicator:
    browser = ApplicationCommunicator(site, dict(SCOPE))
    await browser.send_input({"type": "http.request", "body": b""})
    return browser


async def answered(browser: ApplicationCommunicator) -> int:
    return (await browser.receive_output(20))["status"]


async def crowd(site: Slow, inside: int) -> list[ApplicationCommunicator]:
    """MANY come; returns once so many of them are at work, and no more."""
    browsers, ends = [await come(site) for _ in range(MANY)], time.monotonic() + 20
    while site.inside < inside:
        assert time.monotonic() < ends, f"{site.inside} of {inside} are at work"
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert site.inside == inside, "the others wait at the door"
    return browsers


@pytest.fixture
def patient(monkeypatch):
    """No turn is given up early."""
    monkeypatch.setattr(asgi_handler, "BUSY_SECONDS", 20.0)


async def test_few_are_at_work_at_once_and_all_are_answered(patient):
    site = Slow()
    browsers = await crowd(site, BUSY_REQUESTS)
    site.open.set()
    assert [await answered(each) for each in browsers] == [200] * MANY
    assert site.most == BUSY_REQUESTS, "nor did more come in later"
    assert site.served == MANY


async def test_request_that_waits_for_postgres_releases_its_slot(monkeypatch):
    """Let all requests wait at the same time, as they do while Postgres is away."""
    monkeypatch.setattr(asgi_handler, "BUSY_SECONDS", 0.05)
    site = Slow()
    browsers = await crowd(site, MANY)
    site.open.set()
    assert [await answered(each) for each in browsers] == [200] * MANY
    monkeypatch.setattr(asgi_handler, "BUSY_SECONDS", 20.0)
    site.open.clear()
    again = await crowd(
        site, BUSY_REQUESTS
    )  # a turn that was given up early is not given back a second time
    site.open.set()
    assert [await answered(each) for each in again] == [200] * MANY


async def test_who_has_left_the_door_is_not_served(patient):
    site = Slow()
    browsers = await crowd(site, BUSY_REQUESTS)
    for browser in browsers[BUSY_REQUESTS:]:
        await browser.send_input({"type": "http.disconnect"})
    site.open.set()
    assert [await answered(each) for each in browsers[:BUSY_REQUESTS]] == [200] * BUSY_REQUESTS
    for browser in browsers[BUSY_REQUESTS:]:
        await browser.wait(20)
    assert site.served == BUSY_REQUESTS


async def test_a_request_that_fails_gives_its_turn_to_the_next(patient):
    class Broken(ThreadedHandler):
        def get_response(self, request):
            raise RuntimeError("this request fails")

    site = Broken()
    for _ in range(2 * BUSY_REQUESTS):
        browser = await come(site)
        with pytest.raises(RuntimeError, match="this request fails"):
            await browser.wait(20)


async def test_what_is_there_from_the_start_is_left_alone_by_the_collector():
    before = gc.get_threshold()
    server = ApplicationCommunicator(application, {"type": "lifespan", "asgi": {"version": "3.0"}})
    try:
        await server.send_input({"type": "lifespan.startup"})
        assert await server.receive_output(20) == {"type": "lifespan.startup.complete"}
        assert gc.get_freeze_count() > 100_000, "all of Django, and more"
        assert gc.get_threshold()[0] == GC_THRESHOLD
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
        server.stop(exceptions=False)
