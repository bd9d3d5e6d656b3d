"""The registry of kinds: what the events of one kind of subject mean. Adding a kind is one file in the app that owns
the rows, which the app registers here when it is ready."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

from pydantic import ValidationError
from pydantic_core import from_json

from barnraise.protocol.types import Message

State = dict[str, Any]  # JSON
EventDraft = tuple[str, str, dict[str, Any]]  # (type, subject, payload)


@dataclass(frozen=True)
class Fact:
    """One accepted event, as folds see it: `what` is its type without the kind. Facts sort by (hlc, id)."""

    hlc: int
    id: UUID
    digest: str
    action: str
    payload: Any  # of the shape that the kind names

    @property
    def order_key(self) -> tuple[int, UUID, str]:
        return self.hlc, self.id, self.digest


class DependencyMissingError(Exception):
    """A row cannot be written before another subject's is there."""


UniqueValues = dict[
    str, tuple[str, int, str]
]  # space → (word, hlc, id of the event that claimed it)


def no_existing_events() -> Iterable[EventDraft]:
    return ()


def no_unique_values(state: State) -> UniqueValues:
    return {}


def no_private_data(state: State) -> list[str]:
    return []


def no_batch(states: dict[str, State]) -> set[str]:
    return set()


@dataclass(frozen=True)
class AggregateType:
    """`shapes`: what → its payload. `fold`: facts of one subject, sorted → its state, None where there is none; pure,
    and a function of the *set* of facts. `store`: (the subject's name without the kind, state) into rows; raises DependencyMissingError
    before it writes, and returns names of subjects that the rows would refer to, and do without while those have none.
    `words`: of a state, those that only one subject may have. `needs`: digests of its particulars. `existing`: events
    that say what rows say, for a site that is older than its log. `together`: of states by name, those that nothing
    stands in the way of, into rows all at once; returns their names, and `store` has the others. What it writes is what
    `store` would: a new mirror has a hundred thousand of them."""

    name: str
    payload_types: Mapping[str, type[Message]]
    fold: Callable[[Sequence[Fact]], State | None]
    store: Callable[[str, State | None], list[str] | None]
    unique_values: Callable[[State], UniqueValues] = no_unique_values
    private_digests: Callable[[State], list[str]] = no_private_data
    existing_events: Callable[[], Iterable[EventDraft]] = no_existing_events
    store_batch: Callable[[dict[str, State]], set[str]] = no_batch

    @property
    def event_types(self) -> list[str]:
        return [f"{self.name}.{what}" for what in self.payload_types]


_kinds: dict[str, AggregateType] = {}


def register(*kinds: AggregateType) -> None:
    _kinds.update({kind.name: kind for kind in kinds})


def aggregate_types() -> dict[str, AggregateType]:
    """In the order of the apps: what others refer to comes first."""
    return dict(_kinds)


def event_types() -> list[str]:
    """All types of events that this version understands."""
    return [type for kind in _kinds.values() for type in kind.event_types]


class StoredEvent(NamedTuple):
    """Of an event what folds need: there are a hundred thousand at times."""

    digest: str
    uuid: UUID
    hlc: int
    type: str
    body: str


def decode_fact(event: StoredEvent) -> Fact | None:
    """None where this version does not understand it."""
    kind, _, what = event.type.partition(".")
    known = _kinds.get(kind)
    if known is None or what not in known.payload_types:
        return None
    try:
        said = known.payload_types[what].model_validate(
            from_json(event.body)["payload"]
        )  # an event it was when it came
    except ValidationError:
        return None
    return Fact(event.hlc, event.uuid, event.digest, what, said)
