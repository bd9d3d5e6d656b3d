"""The aggregate type `webhook`.

A webhook's URL and secret are private data. Every mirror can make its calls, and one of them does.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import AwareDatetime, Field

from barnraise.protocol.types import Digest, Id, Message, PlainText
from coordinator.accounts.models import User
from coordinator.eventlog import private_data
from coordinator.eventlog.registry import AggregateType, EventDraft, Fact, State, require_row
from coordinator.notify.models import Webhook


class WebhookSet(Message):
    """The person created or changed a webhook; the digest is that of its `WebhookContent`."""

    person: Id
    created: AwareDatetime
    active: bool
    content_digest: Digest


class WebhookContent(Message):
    """The private data of a webhook."""

    url: PlainText = Field(max_length=500)
    secret: str = Field(pattern=r"^whsec_[0-9A-Za-z+/]{20,50}={0,2}$", max_length=60)
    kinds: list[PlainText] = Field(max_length=50)
    format: Literal["standard", "slack", "discord", "matrix", "ntfy"] = "standard"


class WebhookRemoved(Message):
    """The person deleted the webhook."""


def fold(facts: Sequence[Fact]) -> State | None:
    """Return the last `WebhookSet`, or None once the webhook was removed. Pure."""
    if any(fact.action == "remove" for fact in facts):
        return None
    payloads = (fact.payload for fact in reversed(facts) if fact.action == "set")
    newest = next(payloads, None)
    return newest and newest.model_dump(mode="json")


def private_digests(state: State) -> list[str]:
    """Return the digest of the webhook's private data."""
    return [state["content_digest"]]


def store(webhook_id: str, state: State | None) -> None:
    """Write a webhook's state to its row, once its owner and its private data are here."""
    if state is None:
        Webhook.objects.filter(pk=webhook_id).delete()
        return
    require_row(User.objects.filter(pk=state["person"]), f"person:{state['person']}")
    details = private_data.load(state["content_digest"], WebhookContent)
    if details is None:
        return
    fields = {
        "person_id": state["person"],
        "created": WebhookSet.model_validate(state).created,
        "active": state["active"],
        **details,
    }
    rows = Webhook.objects.filter(pk=webhook_id)
    if not rows.update(**fields):
        Webhook.objects.bulk_create([Webhook(id=webhook_id, **fields)])
    if not state["active"]:
        rows.get().cancel_deliveries()


def existing_events() -> Iterable[EventDraft]:
    """Yield the events that describe all rows."""
    for webhook in Webhook.objects.all():
        yield "webhook.set", str(webhook.pk), webhook.as_event()


AGGREGATE_TYPE = AggregateType(
    "webhook",
    {"set": WebhookSet, "remove": WebhookRemoved},
    fold,
    store,
    private_digests=private_digests,
    existing_events=existing_events,
)
