"""Serve the site as one ASGI application: pages and API by Django, websockets by Channels."""

import gc
import os
import sys
from typing import Any

import django
from asgiref.sync import sync_to_async
from asgiref.typing import ASGIReceiveCallable, ASGISendCallable
from channels.routing import ProtocolTypeRouter, URLRouter
from django.conf import settings

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "coordinator.settings")
django.setup(set_prefix=False)

# The app registry must be filled before these imports.
from coordinator.eventlog.database_owner import describe_refusal  # noqa: E402
from coordinator.lib.asgi_handler import ThreadedHandler  # noqa: E402
from coordinator.lib.embedded import embedded_servers  # noqa: E402
from coordinator.lib.environment import NEEDS_HOST, end_process  # noqa: E402
from coordinator.lib.trusted_proxies import TrustedProxies  # noqa: E402
from coordinator.live.consumers import websocket_urlpatterns  # noqa: E402
from coordinator.ops.error_pages import error_response  # noqa: E402

GC_THRESHOLD = 10_000  # new objects before the garbage collector looks for cycles among them
# How long a computing thread keeps the interpreter from the event loop. With Python's default of
# 5 ms requests mostly wait.
SWITCH_SECONDS = 0.001


def tune_garbage_collector() -> None:
    """Exclude the objects that exist at the start from garbage collection, and collect less often.

    Examining them stops the process for a quarter of a second, and showing a run of thousands of
    machines would cause that every few seconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 10, 10)


async def lifespan(
    scope: dict[str, Any], receive: ASGIReceiveCallable, send: ASGISendCallable
) -> None:
    """Tune the process at its start, and release the embedded servers at its end.

    The servers are released here, because uvicorn dies of the signal that stopped it and runs no
    `atexit` handler.
    """
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            if refusal := await sync_to_async(describe_refusal)():
                await send({"type": "lifespan.startup.failed", "message": refusal})
                return
            tune_garbage_collector()
            sys.setswitchinterval(SWITCH_SECONDS)
        if message["type"] == "lifespan.shutdown":
            await sync_to_async(embedded_servers.release)(settings.STATE_DIR)
        await send({"type": f"{message['type']}.complete"})  # pyright: ignore[reportArgumentType] - the stubs know fewer ASGI messages and routes than Channels accepts
        if message["type"] == "lifespan.shutdown":
            return


if "--root-path" in " ".join(sys.argv) or os.environ.get("UVICORN_ROOT_PATH"):
    end_process(f"--root-path or UVICORN_ROOT_PATH is set; the site {NEEDS_HOST}")

application = TrustedProxies(
    ProtocolTypeRouter(
        {
            "http": ThreadedHandler(error_response),
            "websocket": URLRouter(websocket_urlpatterns),  # pyright: ignore[reportArgumentType] - the stubs know fewer ASGI messages and routes than Channels accepts
            "lifespan": lifespan,
        }
    ),
    settings.PROXIES,
    unix=settings.UNIX_PROXY,
)
