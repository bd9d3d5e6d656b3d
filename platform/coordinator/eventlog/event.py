"""Define the signed event message (kind "event") that mirrors store and exchange."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from barnraise.errors import MessageError
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import open_signed
from barnraise.protocol.types import Digest, Id, Message

MAX_EVENT_CHARS = 100_000
NO_DIGEST = "0" * 64  # `prev` of a log's first event

OriginId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
EventTypeName = Annotated[str, Field(pattern=r"^[a-z]{1,20}\.[a-z_]{1,30}$")]
AggregateName = Annotated[str, Field(pattern=r"^[a-z]{1,20}:[0-9A-Za-z.:_-]{1,180}$")]


class Event(Message):
    """Describe one change.

    Attributes:
        id: UUID of the event.
        origin: Id of the log that contains the event.
        seq: Position in that log, from 1.
        prev: BLAKE3 digest of the preceding event's text.
        hlc: Hybrid logical timestamp (see `hlc`).
        type: "aggregate_type.action".
        aggregate: "aggregate_type:name", of the same aggregate type as `type`.
        payload: Content, shaped as the aggregate type declares for the action.
    """

    id: Id
    origin: OriginId
    seq: int = Field(ge=1, lt=1 << 53)
    prev: Digest
    hlc: int = Field(ge=0, lt=1 << 63)
    type: EventTypeName
    aggregate: AggregateName
    payload: dict[str, Any] = Field(max_length=100)

    @model_validator(mode="after")
    def check_one_aggregate_type(self) -> "Event":
        """Reject an event whose type and aggregate belong to different aggregate types."""
        if self.aggregate_type != self.aggregate.partition(":")[0]:
            raise ValueError("type and aggregate belong to different aggregate types")
        return self

    @property
    def aggregate_type(self) -> str:
        """Return the name of the aggregate type."""
        return self.type.partition(".")[0]


def open_event(signed: Signed) -> Event:
    """Verify the signature and return the event inside.

    Raises:
        MessageError: The text is too long, malformed, or its signature does not match.
    """
    if len(signed.body) > MAX_EVENT_CHARS:
        raise MessageError(
            f"an event by {signed.key[:8]} is longer than {MAX_EVENT_CHARS:,} characters"
        )
    return open_signed(signed, "event", Event)


def open_events(signed: Sequence[Signed]) -> list[Event]:
    """Open many events; raise MessageError at the first invalid one."""
    return [open_event(message) for message in signed]
