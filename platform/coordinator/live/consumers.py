"""A watcher's websocket: it is told, and asks for nothing."""

from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer

from coordinator.live.broadcaster import group, watchers
from coordinator.runs.models import Run

NOT_HERE = 4404  # close code: no such run, or not for this person; asking again is of no use


class RunConsumer(AsyncWebsocketConsumer):
    run: str | None = None

    async def connect(self) -> None:
        run = str(self.scope["url_route"]["kwargs"]["run"])
        if not await visible(run, self.scope["user"]):
            await self.accept()  # a browser learns the code only of a socket that was open
            await self.close(NOT_HERE)
            return
        await self.channel_layer.group_add(group(run), self.channel_name)
        self.run = run
        await watchers.join(run, self.channel_name)
        await self.accept()

    async def disconnect(self, code: int) -> None:
        if self.run:
            await self.channel_layer.group_discard(group(self.run), self.channel_name)
            await watchers.leave(self.run, self.channel_name)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Watchers have nothing to say; what they say all the same is not heard."""

    async def live_frame(self, event: dict) -> None:
        await self.send(text_data=event["text"])


@database_sync_to_async
def visible(run: str, user) -> bool:
    return Run.objects.visible_to(user).filter(pk=run).exists()
