"""One event as it is signed (kind "event") and travels between mirrors."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from barnraise.errors import MessageError
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import open_signed
from barnraise.protocol.types import Digest, Id, Message

MAX_EVENT_CHARS = 100_000  # characters of an event's text
NO_DIGEST = "0" * 64  # what stands before the first

OriginId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
EventTypeName = Annotated[str, Field(pattern=r"^[a-z]{1,20}\.[a-z_]{1,30}$")]
AggregateName = Annotated[str, Field(pattern=r"^[a-z]{1,20}:[0-9A-Za-z.:_-]{1,180}$")]


class Event(Message):
    """The change `seq` of a log (`origin`). `prev` is the BLAKE3 of the text before, `hlc` a hybrid time (see `clock`);
    `type` is "kind.what" and `subject` "kind:which", of one kind; `payload` is as the kind's file says."""

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
        if self.aggregate_type != self.aggregate.partition(":")[0]:
            raise ValueError("type and subject are of two kinds")
        return self

    @property
    def aggregate_type(self) -> str:
        return self.type.partition(".")[0]


def open_event(signed: Signed) -> Event:
    """The event inside, once its signature holds. Raises MessageError."""
    if len(signed.body) > MAX_EVENT_CHARS:
        raise MessageError(
            f"an event by {signed.key[:8]} is longer than {MAX_EVENT_CHARS:,} characters"
        )
    return open_signed(signed, "event", Event)


def open_events(signed: Sequence[Signed]) -> list[Event]:
    """Raises MessageError with the first that is no event."""
    return [open_event(each) for each in signed]
