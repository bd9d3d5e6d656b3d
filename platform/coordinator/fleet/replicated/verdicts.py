"""The aggregate type "verdict", by run and digest: what is retracted, and who signed."""

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime

from pydantic import AwareDatetime, Field, ValidationError

from barnraise.protocol.signing import digest
from barnraise.protocol.types import DocumentText, Id, Message, PublicKey, Signature
from barnraise.protocol.verdicts import MAX_SIGNATURES, MAX_VERDICT_BYTES, Verdict
from coordinator.accounts.models import User
from coordinator.eventlog.registry import AggregateType, EventDraft, Fact, State, require_row
from coordinator.fleet.models import VerdictRecord
from coordinator.fleet.verdict_models import RunExclusion
from coordinator.runs.models import Run

log = logging.getLogger("coordinator.fleet")


class VerdictIssued(Message):
    """A mirror signed the verdict."""

    id: Id
    body: DocumentText = Field(max_length=MAX_VERDICT_BYTES)
    signatures: dict[PublicKey, Signature] = Field(min_length=1, max_length=MAX_SIGNATURES)
    given: AwareDatetime
    by: Id | None = None


def fold(facts: Sequence[Fact]) -> State | None:
    """Collect the signatures of all mirrors that signed the text.

    Signatures accumulate and none is ever withdrawn. A verdict is final too: machines have
    subtracted what it names.
    """
    first = facts[0].payload
    issued = [fact.payload for fact in reversed(facts) if fact.payload.body == first.body]
    return {
        "id": first.id,
        "body": first.body,
        "signatures": {
            key: signature for event in issued for key, signature in event.signatures.items()
        },
        "given": first.given.isoformat(),
        "by": first.by,
    }


def store(verdict_id: str, state: State | None) -> None:
    """Write the verdict's row."""
    run_id, _, body_digest = verdict_id.partition(":")
    if state is None:
        VerdictRecord.objects.filter(run=run_id, digest=body_digest).delete()
        return
    if digest(state["body"]) != body_digest:
        log.error("the event of verdict %s has a text with another digest", body_digest[:12])
        return
    try:
        Verdict.model_validate_json(state["body"])
    except ValidationError:
        log.error("the event of verdict %s has a text that is no verdict", body_digest[:12])
        return
    run = require_row(Run.objects.filter(pk=run_id), f"run:{run_id}")
    by = None
    if state["by"]:
        by = User.objects.filter(pk=state["by"]).values_list("pk", flat=True).first()
    fields = {
        "body": state["body"],
        "signatures": state["signatures"],
        "given": datetime.fromisoformat(state["given"]),
        "by_id": by,
    }
    row, _ = VerdictRecord.objects.update_or_create(
        run=run, digest=body_digest, defaults=fields, create_defaults={"id": state["id"], **fields}
    )
    row.update_force()
    RunExclusion.store_for(row)


def existing_events() -> Iterable[EventDraft]:
    """Describe the rows of a site that is older than its log."""
    for verdict in VerdictRecord.objects.order_by("pk").iterator():
        yield "verdict.give", verdict.aggregate_name, verdict.event_payload()


AGGREGATE_TYPE = AggregateType(
    "verdict", {"give": VerdictIssued}, fold, store, existing_events=existing_events
)
