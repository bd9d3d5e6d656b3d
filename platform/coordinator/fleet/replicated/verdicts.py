"""The kind "verdict", by run and digest of its text: what is taken out of a run again, and who has signed that."""

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime

from pydantic import AwareDatetime, Field

from barnraise.errors import MessageError
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import digest, open_signed
from barnraise.protocol.types import Id, Message, PublicKey, Signature
from barnraise.protocol.verdicts import MAX_VERDICT_BYTES
from barnraise.protocol.verdicts import Verdict as Said
from coordinator.accounts.models import User
from coordinator.eventlog.registry import (
    AggregateType,
    DependencyMissingError,
    EventDraft,
    Fact,
    State,
)
from coordinator.fleet.models import VerdictRecord
from coordinator.runs.models import Run

log = logging.getLogger("coordinator.fleet")


class VerdictIssued(Message):
    id: Id
    body: str = Field(max_length=MAX_VERDICT_BYTES)
    signatures: dict[PublicKey, Signature] = Field(min_length=1, max_length=16)
    given: AwareDatetime
    by: Id | None = None


def fold(facts: Sequence[Fact]) -> State | None:
    """Signatures add up: each mirror that agrees gives the same text with its own, and none is ever taken back. A
    verdict cannot be undone either: machines have subtracted what it names."""
    first = facts[0].payload
    given = [fact.payload for fact in reversed(facts) if fact.payload.body == first.body]
    return {
        "id": first.id,
        "body": first.body,
        "signatures": {
            key: signature for each in given for key, signature in each.signatures.items()
        },
        "given": first.given.isoformat(),
        "by": first.by,
    }


def store(which: str, state: State | None) -> None:
    run_id, _, named = which.partition(":")
    if state is None:
        VerdictRecord.objects.filter(run=run_id, digest=named).delete()
        return
    if digest(state["body"]) != named:
        log.error("an event tells of a verdict %s, and its text is another", named[:12])
        return
    run = Run.objects.filter(pk=run_id).first()
    if run is None:
        raise DependencyMissingError(f"run:{run_id}")
    by = (
        User.objects.filter(pk=state["by"]).values_list("pk", flat=True).first()
        if state["by"]
        else None
    )
    fields = {
        "body": state["body"],
        "signatures": state["signatures"],
        "proven": is_proven(run, state),
        "given": datetime.fromisoformat(state["given"]),
        "by_id": by,
    }
    if not VerdictRecord.objects.filter(run=run, digest=named).update(**fields):
        VerdictRecord.objects.bulk_create(
            [VerdictRecord(id=state["id"], run=run, digest=named, **fields)]
        )


def is_proven(run: Run, state: State) -> bool:
    """Whether as many of the run's mirrors have signed as its rules ask for."""
    spec = run.spec
    held = [key for key in spec.roots if _holds(key, state)]
    return len(held) >= spec.threshold


def _holds(key: str, state: State) -> bool:
    if key not in state["signatures"]:
        return False
    try:
        open_signed(
            Signed(key=key, body=state["body"], signature=state["signatures"][key]), "verdict", Said
        )
    except MessageError:
        return False
    return True


def existing_events() -> Iterable[EventDraft]:
    for verdict in VerdictRecord.objects.order_by("pk").iterator():
        yield "verdict.give", verdict.aggregate_name, verdict.event_payload()


AGGREGATE_TYPE = AggregateType(
    "verdict", {"give": VerdictIssued}, fold, store, existing_events=existing_events
)
