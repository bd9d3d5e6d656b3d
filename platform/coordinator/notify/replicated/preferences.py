"""The kind "wish", by person: of what they want to be told, and where. Whoever switched letters off gets none from any
mirror."""

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field

from barnraise.protocol.types import Message
from coordinator.accounts.models import User
from coordinator.eventlog.registry import AggregateType as Shared
from coordinator.eventlog.registry import DependencyMissingError, EventDraft, Fact, State
from coordinator.notify.models import NotificationPreference
from coordinator.notify.notification_types import NotificationType

PLACES = ("site", "email")


class SetPreference(Message):
    kind: str = Field(pattern=r"^[a-z.]{1,20}$")
    where: Literal["site", "email"]
    wanted: bool


class ForgetPreferences(Message):
    pass


def fold(facts: Sequence[Fact]) -> State | None:
    """Each choice by itself: the last word."""
    if any(fact.action == "forget" for fact in facts):
        return None
    wanted: State = {}
    for fact in facts:
        wanted.setdefault(fact.payload.kind, {})[fact.payload.where] = fact.payload.wanted
    return wanted or None


def store(which: str, state: State | None) -> None:
    """A kind that this version does not know is a later one's."""
    if state is None:
        NotificationPreference.objects.filter(person=which).delete()
        return
    if not User.objects.filter(pk=which).exists():
        raise DependencyMissingError(f"person:{which}")
    known = {
        kind: {"site": True, "email": True} | said
        for kind, said in state.items()
        if kind in NotificationType.values
    }
    NotificationPreference.objects.filter(person=which).exclude(kind__in=known).delete()
    NotificationPreference.objects.bulk_create(
        [NotificationPreference(person_id=which, kind=kind, **said) for kind, said in known.items()],
        update_conflicts=True, unique_fields=["person", "kind"], update_fields=list(PLACES),
    )  # fmt: skip


def existing() -> Iterable[EventDraft]:
    for choice in NotificationPreference.objects.all():
        for where in PLACES:
            yield "wish.choose", str(choice.person_id), choice.as_event(where)


AGGREGATE_TYPE = Shared(
    "wish",
    {"choose": SetPreference, "forget": ForgetPreferences},
    fold,
    store,
    existing_events=existing,
)
