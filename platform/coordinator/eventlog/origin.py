"""The kind "origin": a log begins. It says who writes it, and which log of theirs it goes on from."""

from collections.abc import Sequence

from pydantic import Field

from barnraise.protocol.types import Message, PlainText
from coordinator.eventlog.event import OriginId
from coordinator.eventlog.registry import AggregateType, Fact, State


class LogStarted(Message):
    name: PlainText = Field(max_length=100)
    after: OriginId | None = None


def fold(facts: Sequence[Fact]) -> State | None:
    """A log has one first event; its chain sees to that."""
    return {"name": facts[0].payload.name, "after": facts[0].payload.after}


def store(which: str, state: State | None) -> None:
    """Its row is the log's own, and is there before any of its events is folded."""


AGGREGATE_TYPE = AggregateType("origin", {"begin": LogStarted}, fold, store)
