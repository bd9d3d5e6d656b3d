"""A watcher's websocket on the site's own ASGI application."""

import json

from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.test import Client

from coordinator.asgi import application

SECONDS = 8  # the longest wait for one message


class WatcherSocket(ApplicationCommunicator):
    """A browser's websocket to /ws/runs/{run}/, driven as an ASGI server would."""

    def __init__(self, run: object, client: Client | None = None, origin: str = "http://localhost"):
        headers = [(b"host", b"localhost"), (b"origin", origin.encode())]
        if client:
            headers.append((b"cookie", f"sessionid={client.cookies['sessionid'].value}".encode()))
        path = f"/ws/runs/{run}/"
        super().__init__(
            application,
            {
                "type": "websocket",
                "path": path,
                "headers": headers,
                "query_string": b"",
                "subprotocols": [],
            },
        )

    async def connect(self) -> dict:
        """Connect and return the answer: websocket.accept or websocket.close."""
        await self.send_input({"type": "websocket.connect"})
        return await self.receive_output(SECONDS)

    async def open(self) -> "WatcherSocket":
        """Connect, fail unless the site accepts, and return this socket."""
        assert (await self.connect())["type"] == "websocket.accept"
        return self

    async def next_frame(self, wanted=lambda frame: True) -> dict:
        """Return the next frame for which `wanted` is true."""
        while True:
            message = await self.receive_output(SECONDS)
            assert message["type"] == "websocket.send", message
            if wanted(frame := json.loads(message["text"])):
                return frame

    async def leave(self) -> None:
        """Close the socket, and wait until the site has noticed."""
        await self.send_input({"type": "websocket.disconnect", "code": 1001})
        await self.wait(SECONDS)


async def snapshot(run, client: Client | None = None) -> dict:
    """Return the snapshot of a run's page, as this client gets it."""
    response = await sync_to_async((client or Client()).get)(f"/live/{run.pk}/")
    assert response.status_code == 200
    return json.loads(response.content)
