"""The aggregate type "pause", by a machine's key: its owner paused it, at every mirror."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from pydantic import AwareDatetime

from barnraise.protocol.types import Id, Message
from coordinator.accounts.models import Machine, User
from coordinator.eventlog.registry import AggregateType, EventDraft, Fact, State, require_row
from coordinator.fleet.models import MachinePause


class MachinePauseStarted(Message):
    """The owner paused the machine."""

    at: AwareDatetime
    until: AwareDatetime | None = None  # none: until its owner ends it
    by: Id | None = None


class MachinePauseEnded(Message):
    """The owner let the machine continue."""


def fold(facts: Sequence[Fact]) -> State | None:
    """Return the pause if the last event started one: the owner can undo either at once."""
    last = facts[-1]
    if last.action == "end":
        return None
    until = last.payload.until
    return {
        "since": last.payload.at.isoformat(),
        "until": until.isoformat() if until else None,
        "by": last.payload.by,
    }


def store(pause_id: str, state: State | None) -> None:
    """Write the pause's row, or delete it."""
    if state is None:
        MachinePause.objects.filter(machine__key=pause_id).delete()
        return
    machine = require_row(Machine.objects.filter(key=pause_id), f"machine:{pause_id}")
    by = User.objects.filter(pk=state["by"]).first() if state["by"] else None
    until = datetime.fromisoformat(state["until"]) if state["until"] else None
    fields = {"since": datetime.fromisoformat(state["since"]), "until": until, "by": by}
    MachinePause.objects.update_or_create(machine=machine, defaults=fields)


def existing_events() -> Iterable[EventDraft]:
    """Describe the rows of a site that is older than its log."""
    for pause in MachinePause.objects.select_related("machine").iterator():
        yield "pause.start", pause.machine.key, pause.event_payload()


AGGREGATE_TYPE = AggregateType(
    "pause",
    {"start": MachinePauseStarted, "end": MachinePauseEnded},
    fold,
    store,
    existing_events=existing_events,
)
