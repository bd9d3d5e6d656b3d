"""The aggregate type `preference`, one per person.

A person who switched emails off receives none from any mirror.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field

from barnraise.protocol.types import Message
from coordinator.accounts.models import User
from coordinator.eventlog.registry import AggregateType, EventDraft, Fact, State, require_row
from coordinator.notify.models import NotificationPreference
from coordinator.notify.notification_types import NotificationType

CHANNELS = ("site", "email")


class PreferenceSet(Message):
    """Whether a person wants notifications of one type in one channel."""

    kind: str = Field(pattern=r"^[a-z.]{1,20}$")
    channel: Literal["site", "email"]
    wanted: bool


class PreferencesDeleted(Message):
    """The person deleted their account."""


def fold(facts: Sequence[Fact]) -> State | None:
    """Return {type: {channel: wanted}}; for each type and channel the last event decides. Pure."""
    if any(fact.action == "delete" for fact in facts):
        return None
    state: State = {}
    for fact in facts:
        state.setdefault(fact.payload.kind, {})[fact.payload.channel] = fact.payload.wanted
    return state or None


def store(person_id: str, state: State | None) -> None:
    """Write a person's state to rows; types that only a later version knows are ignored."""
    if state is None:
        NotificationPreference.objects.filter(person=person_id).delete()
        return
    require_row(User.objects.filter(pk=person_id), f"person:{person_id}")
    preferences = {
        kind: {"site": True, "email": True} | channels
        for kind, channels in state.items()
        if kind in NotificationType.values
    }
    NotificationPreference.objects.filter(person=person_id).exclude(kind__in=preferences).delete()
    NotificationPreference.objects.bulk_create(
        [
            NotificationPreference(person_id=person_id, kind=kind, **channels)
            for kind, channels in preferences.items()
        ],
        update_conflicts=True,
        unique_fields=["person", "kind"],
        update_fields=list(CHANNELS),
    )


def existing_events() -> Iterable[EventDraft]:
    """Yield the events that describe all rows."""
    for preference in NotificationPreference.objects.all():
        for channel in CHANNELS:
            payload = preference.as_event(channel)
            yield "preference.set", str(preference.person_id), payload


AGGREGATE_TYPE = AggregateType(
    "preference",
    {"set": PreferenceSet, "delete": PreferencesDeleted},
    fold,
    store,
    existing_events=existing_events,
)
