"""The websocket of a run's watchers: it sends deltas and ignores what it receives.

This is plain ASGI rather than a Channels consumer, which subscribes to Valkey and switches to a
thread for each socket and each delta: two thousand watchers per process leave no room for that.
"""

import asyncio
from importlib import import_module
from typing import Any

from channels.db import database_sync_to_async
from django.conf import settings
from django.contrib.auth import get_user
from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest, parse_cookie
from django.urls import path, re_path

from coordinator.lib.subscriber_network import subscriber_network
from coordinator.live.broadcaster import Watcher, watchers
from coordinator.live.cross_site import is_own_origin, requesting_mirror
from coordinator.live.watcher_limits import WatcherLimits
from coordinator.runs.models import Run

CLOSE_NOT_FOUND = 4404  # close code: no such run, or not visible; the client must not retry


limits = WatcherLimits()


async def watch_run(scope: Any, receive: Any, send: Any) -> None:
    """Send the run's deltas until the browser disconnects; ignore its messages.

    A socket for which there is no place is refused; the page tries again.
    """
    client = scope.get("client")
    network = subscriber_network(client[0] if client else "")
    if not limits.admit(network):
        await receive()
        await send({"type": "websocket.close"})
        return
    try:
        await _watch_admitted(scope, receive, send)
    finally:
        limits.remove(network)


async def _watch_admitted(scope: Any, receive: Any, send: Any) -> None:
    run = str(scope["url_route"]["kwargs"]["run"])
    await receive()  # websocket.connect
    is_visible = await may_watch(run, dict(scope["headers"]))
    if is_visible is None:
        await send({"type": "websocket.close"})
        return
    if not is_visible:
        # A browser learns the close code only of a socket that was accepted.
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.close", "code": CLOSE_NOT_FOUND})
        return
    watcher = Watcher(send)
    try:
        await watchers.subscribe(run, watcher)
        await send({"type": "websocket.accept"})
        sender = asyncio.create_task(watcher.send_deltas())
        try:
            while (await receive())["type"] != "websocket.disconnect":
                continue
        finally:
            sender.cancel()
    finally:
        await watchers.unsubscribe(run, watcher)


async def reject_unknown_path(scope: Any, receive: Any, send: Any) -> None:
    """Close a socket to any other address; otherwise each would be an error in the log."""
    await receive()
    await send({"type": "websocket.close"})


@database_sync_to_async
def may_watch(run: str, headers: dict[bytes, bytes]) -> bool | None:
    """Return whether the session that the cookie names may watch the run.

    Channels' own session middleware would read that session again for every delta and watcher.

    Returns:
        None if the requesting page belongs neither to this site nor to another mirror.
    """
    origin = headers.get(b"origin", b"").decode("latin-1")
    if requesting_mirror(origin):
        return Run.objects.visible_to(AnonymousUser()).filter(pk=run).exists()
    if not is_own_origin(origin):
        return None
    request = HttpRequest()
    cookies = parse_cookie(headers.get(b"cookie", b"").decode("latin-1"))
    store = import_module(settings.SESSION_ENGINE).SessionStore
    request.session = store(cookies.get(settings.SESSION_COOKIE_NAME))
    return Run.objects.visible_to(get_user(request)).filter(pk=run).exists()


websocket_urlpatterns = [path("ws/runs/<uuid:run>/", watch_run), re_path("", reject_unknown_path)]
