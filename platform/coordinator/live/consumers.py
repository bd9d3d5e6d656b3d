"""A watcher's websocket: it is told, and asks for nothing.

Plain ASGI rather than a Channels consumer: that one subscribes to Valkey and hops to a thread for each socket and each
delta, which two thousand watchers a process do not leave room for.
"""

import asyncio
from importlib import import_module

from channels.db import database_sync_to_async
from django.conf import settings
from django.contrib.auth import get_user
from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest, parse_cookie

from coordinator.live.broadcaster import Watcher, watchers
from coordinator.live.cross_site import is_own_origin, requesting_mirror
from coordinator.runs.models import Run

NOT_HERE = 4404  # close code: no such run, or not for this person; asking again is of no use


async def watch_run(scope, receive, send) -> None:
    """Until the browser leaves. What it says meanwhile is not heard."""
    run = str(scope["url_route"]["kwargs"]["run"])
    await receive()  # that it wants to connect
    sees = await may_watch(run, dict(scope["headers"]))
    if sees is None:
        await send({"type": "websocket.close"})
        return
    if not sees:
        await send(
            {"type": "websocket.accept"}
        )  # a browser learns the code only of a socket that was open
        await send({"type": "websocket.close", "code": NOT_HERE})
        return
    watcher = Watcher(send)
    try:
        await watchers.subscribe(run, watcher)
        await send({"type": "websocket.accept"})
        telling = asyncio.create_task(watcher.send_deltas())
        try:
            while (await receive())["type"] != "websocket.disconnect":
                continue
        finally:
            telling.cancel()
    finally:
        await watchers.unsubscribe(run, watcher)


async def reject_unknown_path(scope, receive, send) -> None:
    """Refuses a socket to any other address; without it each would be an error in the log."""
    await receive()
    await send({"type": "websocket.close"})


@database_sync_to_async
def may_watch(run: str, headers: dict[bytes, bytes]) -> bool | None:
    """To whose session the browser's cookie names; None: the page it is on is neither ours nor another mirror's.
    Channels' own middleware would go on to look after that session with each delta to each watcher."""
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
