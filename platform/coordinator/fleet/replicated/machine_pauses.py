"""The kind "rest", by a machine's key: its owner lets it take no steps, whichever mirror it reports to."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from pydantic import AwareDatetime

from barnraise.protocol.types import Id, Message
from coordinator.accounts.models import Machine, User
from coordinator.eventlog.registry import (
    AggregateType,
    DependencyMissingError,
    EventDraft,
    Fact,
    State,
)
from coordinator.fleet.models import Rest


class Begin(Message):
    at: AwareDatetime
    by: Id | None = None


class End(Message):
    pass


def fold(facts: Sequence[Fact]) -> State | None:
    """The last word counts: to rest or not is its owner's whim, and either is undone at once."""
    said = facts[-1]
    return (
        None
        if said.action == "end"
        else {"since": said.payload.at.isoformat(), "by": said.payload.by}
    )


def store(which: str, state: State | None) -> None:
    if state is None:
        Rest.objects.filter(machine__key=which).delete()
        return
    machine = Machine.objects.filter(key=which).first()
    if machine is None:
        raise DependencyMissingError(f"machine:{which}")
    by = User.objects.filter(pk=state["by"]).first() if state["by"] else None
    fields = {"since": datetime.fromisoformat(state["since"]), "by": by}
    Rest.objects.update_or_create(machine=machine, defaults=fields)


def existing() -> Iterable[EventDraft]:
    for rest in Rest.objects.select_related("machine").iterator():
        yield "rest.begin", rest.machine.key, rest.told


AGGREGATE_TYPE = AggregateType(
    "rest", {"begin": Begin, "end": End}, fold, store, existing_events=existing
)
