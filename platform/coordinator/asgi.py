"""The site as one ASGI application: pages and API by Django, websockets by Channels."""

import gc
import os
import sys

import django
from asgiref.sync import sync_to_async
from channels.routing import ProtocolTypeRouter, URLRouter
from django.conf import settings

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "coordinator.settings")
django.setup(set_prefix=False)

from coordinator.lib import embedded_servers  # noqa: E402  (the app registry must be filled first)
from coordinator.lib.asgi_handler import Pages  # noqa: E402
from coordinator.live.consumers import websocket_urlpatterns  # noqa: E402

YOUNG = 10_000  # objects that may be made before those made since are looked through for cycles
SWITCH = 0.001  # seconds until a thread that computes lets the loop on; at Python's 5 ms requests mostly wait


def spare_the_collector() -> None:
    """What is there from the start is never looked through again: that takes a quarter of a second, in which all stands
    still, and looking at a run of thousands brings it about every few seconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)


async def lifespan(scope: dict, receive, send) -> None:
    """uvicorn dies of the signal that stopped it, past every atexit, so the embedded servers are left here."""
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            spare_the_collector()
            sys.setswitchinterval(SWITCH)
        if message["type"] == "lifespan.shutdown":
            await sync_to_async(embedded_servers.leave)(settings.STATE_DIR)
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


application = ProtocolTypeRouter(
    {
        "http": Pages(),
        "websocket": URLRouter(websocket_urlpatterns),
        "lifespan": lifespan,
    }
)
