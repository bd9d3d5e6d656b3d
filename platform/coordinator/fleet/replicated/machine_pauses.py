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
from coordinator.fleet.models import MachinePause


class MachinePauseStarted(Message):
    at: AwareDatetime
    by: Id | None = None


class MachinePauseEnded(Message):
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
        MachinePause.objects.filter(machine__key=which).delete()
        return
    machine = Machine.objects.filter(key=which).first()
    if machine is None:
        raise DependencyMissingError(f"machine:{which}")
    by = User.objects.filter(pk=state["by"]).first() if state["by"] else None
    fields = {"since": datetime.fromisoformat(state["since"]), "by": by}
    MachinePause.objects.update_or_create(machine=machine, defaults=fields)


def existing_events() -> Iterable[EventDraft]:
    for rest in MachinePause.objects.select_related("machine").iterator():
        yield "pause.start", rest.machine.key, rest.event_payload()


AGGREGATE_TYPE = AggregateType(
    "pause",
    {"start": MachinePauseStarted, "end": MachinePauseEnded},
    fold,
    store,
    existing_events=existing_events,
)
