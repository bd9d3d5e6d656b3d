"""The kind "webhook": that somebody has one. Its address and its secret are particulars: every mirror can make its
calls, and one of them does."""

from collections.abc import Iterable, Sequence

from pydantic import AwareDatetime, Field

from barnraise.protocol.types import Digest, Id, Message
from coordinator.accounts.models import User
from coordinator.eventlog import private_data
from coordinator.eventlog.registry import (
    AggregateType,
    DependencyMissingError,
    EventDraft,
    Fact,
    State,
)
from coordinator.notify.models import Webhook


class SetWebhook(Message):
    person: Id
    created: AwareDatetime
    active: bool
    about: Digest


class WebhookDetails(Message):
    """Particulars."""

    url: str = Field(max_length=500)
    secret: str = Field(pattern=r"^whsec_[0-9A-Za-z+/]{20,50}={0,2}$", max_length=60)
    kinds: list[str] = Field(max_length=50)


class RemoveWebhook(Message):
    pass


def fold(facts: Sequence[Fact]) -> State | None:
    """The last word, until it is removed: that is for good."""
    if any(fact.action == "remove" for fact in facts):
        return None
    said = next((fact.payload for fact in reversed(facts) if fact.action == "set"), None)
    return said and said.model_dump(mode="json")


def needs(state: State) -> list[str]:
    return [state["about"]]


def store(which: str, state: State | None) -> None:
    if state is None:
        Webhook.objects.filter(pk=which).delete()
        return
    if not User.objects.filter(pk=state["person"]).exists():
        raise DependencyMissingError(f"person:{state['person']}")
    about = private_data.load(state["about"], WebhookDetails)
    if about is None:
        return
    created = SetWebhook.model_validate(state).created
    fields = {"person_id": state["person"], "created": created, "active": state["active"], **about}
    found = Webhook.objects.filter(pk=which)
    if not found.update(**fields):
        Webhook.objects.bulk_create([Webhook(id=which, **fields)])
    if not state["active"]:
        found.get().cancel_deliveries()


def existing() -> Iterable[EventDraft]:
    for hook in Webhook.objects.all():
        yield "webhook.set", str(hook.pk), hook.as_event


AGGREGATE_TYPE = AggregateType(
    "webhook",
    {"set": SetWebhook, "remove": RemoveWebhook},
    fold,
    store,
    private_digests=needs,
    existing_events=existing,
)
