"""A message as it arrived, and what receives it."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from barnraise.peering.links.connection import Connection
from barnraise.protocol.types import Message

Body = TypeVar("Body", bound=Message)


@dataclass(frozen=True)
class Received(Generic[Body]):
    """A message that a connected peer sent.

    Attributes:
        connection: The connection to the peer.
        message: The message.
        payload: The raw bytes behind it; empty for most types.
        at: Event loop time of its arrival, in seconds.
    """

    connection: Connection
    message: Body
    payload: memoryview
    at: float

    @property
    def key(self) -> str:
        """The peer's key."""
        return self.connection.key


# Receives messages of one type; a `MessageError` that it raises ends the connection.
MessageHandler = Callable[[Received[Any]], Awaitable[None] | None]
MessageHandlers = Mapping[type[Message], MessageHandler]
