"""Register aggregate types: what the events about one type of thing mean.

An app adds an aggregate type in one module, next to the rows that it owns, and registers it here
from its `AppConfig.ready`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from django.db.models import Model, QuerySet
from pydantic import ValidationError
from pydantic_core import from_json

from barnraise.protocol.types import Message

Row = TypeVar("Row", bound=Model)
State = dict[str, Any]  # JSON
EventDraft = tuple[str, str, dict[str, Any]]  # (event type, aggregate, payload)
UniqueValues = dict[str, tuple[str, int, str]]  # namespace → (value, hlc, id of the claiming event)


@dataclass(frozen=True)
class Fact:
    """Hold one accepted event as a fold reads it. Facts sort by `order_key`."""

    hlc: int  # hybrid logical timestamp
    id: UUID
    digest: str  # BLAKE3 of the event's text
    action: str  # the event's type without its aggregate type
    payload: Any  # of the message class that the aggregate type declares for `action`
    mirror: str = ""  # key of the mirror that signed the event

    @property
    def order_key(self) -> tuple[int, UUID, str]:
        """Return the key that orders facts identically at every mirror."""
        return self.hlc, self.id, self.digest


class DependencyMissingError(Exception):
    """A row cannot be written before another aggregate's row exists."""


def require_row(rows: QuerySet[Row], aggregate: str) -> Row:
    """Return the row of `aggregate`, which another row refers to.

    Raises:
        DependencyMissingError: There is no such row yet.
    """
    row = rows.first()
    if row is None:
        raise DependencyMissingError(aggregate)
    return row


def no_existing_events() -> Iterable[EventDraft]:
    """Return no events: the default of `AggregateType.existing_events`."""
    return ()


@dataclass(frozen=True)
class AggregateType:
    """Declare what the events of one aggregate type mean and which rows follow from them.

    Attributes:
        name: The prefix of event types and aggregate names.
        payload_types: Action → message class of its payload.
        fold: Computes an aggregate's state from its sorted facts, None if it does not exist. Pure,
            and a function of the *set* of facts.
        store: Writes one state into rows, given the aggregate's name without its type. Raises
            DependencyMissingError before it writes anything. Returns the names of aggregates that
            the rows would refer to and omit while those have no row.
        unique_values: Returns the values of a state that only one aggregate may have.
        private_digests: Returns the digests of the private data that a state names.
        existing_events: Yields events that describe today's rows, for a site older than its log.
        store_batch: Writes those of many states (by name) that nothing prevents, in few statements,
            and returns their names; `store` receives the others. It must write exactly what `store`
            would: a new mirror has a hundred thousand states.
    """

    name: str
    payload_types: Mapping[str, type[Message]]
    fold: Callable[[Sequence[Fact]], State | None]
    store: Callable[[str, State | None], list[str] | None]
    unique_values: Callable[[State], UniqueValues] | None = None
    private_digests: Callable[[State], list[str]] | None = None
    existing_events: Callable[[], Iterable[EventDraft]] = no_existing_events
    store_batch: Callable[[dict[str, State]], set[str]] | None = None

    @property
    def event_types(self) -> list[str]:
        """Return the full names of this type's events."""
        return [f"{self.name}.{action}" for action in self.payload_types]


_aggregate_types: dict[str, AggregateType] = {}


def register(*aggregate_types: AggregateType) -> None:
    """Add aggregate types; those that others refer to must be registered first."""
    _aggregate_types.update(
        {aggregate_type.name: aggregate_type for aggregate_type in aggregate_types}
    )


@contextmanager
def registered_temporarily(*aggregate_types: AggregateType) -> Iterator[None]:
    """Add or replace aggregate types for the duration of a block, for tests."""
    before = dict(_aggregate_types)
    register(*aggregate_types)
    try:
        yield
    finally:
        _aggregate_types.clear()
        _aggregate_types.update(before)


def aggregate_types() -> dict[str, AggregateType]:
    """Return all registered types by name, in the order of registration."""
    return dict(_aggregate_types)


def registration_index(type_name: str) -> int:
    """Return a type's position in the order of registration."""
    return list(_aggregate_types).index(type_name)


def event_types() -> list[str]:
    """Return the names of all event types that this version understands."""
    return [
        name for aggregate_type in _aggregate_types.values() for name in aggregate_type.event_types
    ]


class StoredEvent(NamedTuple):
    """Hold the columns of a stored event that a fold needs.

    A tuple, because a rebuild reads a hundred thousand of them.
    """

    digest: str
    uuid: UUID
    hlc: int
    type: str
    body: str
    key: str


def decode_fact(event: StoredEvent) -> Fact | None:
    """Decode a stored event; None if this version does not understand it."""
    type_name, _, action = event.type.partition(".")
    aggregate_type = _aggregate_types.get(type_name)
    if aggregate_type is None or action not in aggregate_type.payload_types:
        return None
    try:
        # `ingest` validated the surrounding event when it arrived, so only the payload is checked.
        payload = aggregate_type.payload_types[action].model_validate(
            from_json(event.body)["payload"]
        )
    except ValidationError:
        return None
    return Fact(event.hlc, event.uuid, event.digest, action, payload, event.key)
