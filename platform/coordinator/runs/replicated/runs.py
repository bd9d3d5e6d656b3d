"""The aggregate type "run": what it is, who may join, and its status.

A draft belongs to its owner alone and is deleted with their account: its name and spec are private
data until the launch publishes them. Notes stay at the mirror where they were written. Each mirror
gathers machines' reports itself.
"""

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import AwareDatetime, Field, field_validator

from barnraise.protocol import enums
from barnraise.protocol.signing import digest
from barnraise.protocol.types import Digest, DocumentText, Id, Message, PlainText
from barnraise.spec import RunSpec
from coordinator.accounts.models import Team, User
from coordinator.eventlog import private_data, uniqueness
from coordinator.eventlog.registry import (
    AggregateType,
    DependencyMissingError,
    EventDraft,
    Fact,
    State,
    UniqueValues,
    require_row,
)
from coordinator.runs.join_policy import MAX_MEMORY_BYTES
from coordinator.runs.models import MAX_TOKEN_BUDGET, Run
from coordinator.runs.replicated import run_events

Status = enums.RunStatus
RANK = [
    Status.DRAFT,
    Status.RECRUITING,
    Status.TRAINING,
    Status.PAUSED,
    Status.CANCELLED,
    Status.FINISHED,
]
OVER = (Status.CANCELLED, Status.FINISHED)


class RunDraftEdited(Message):
    """The owner edited the draft.

    `content_digest` is that of slug, name and draft. `text_id` is random and changes whenever
    another text must be prepared; a manifest names it. The slug follows the draft's name.
    """

    version: int = Field(ge=0, lt=1 << 31)
    content_digest: Digest
    text_id: str = Field(pattern=r"^[0-9a-f]{16}$")
    slug_digest: Digest


class RunJoinPolicyChanged(Message):
    """The owner changed who may join."""

    version: int = Field(ge=0, lt=1 << 31)
    access: Literal["anyone", "invitation", "team"] = "anyone"
    visibility: Literal["public", "unlisted", "invited"] = "public"
    min_memory: int = Field(default=0, ge=0, le=MAX_MEMORY_BYTES)
    min_device_memory: int = Field(default=0, ge=0, le=MAX_MEMORY_BYTES)
    team: Id | None = None


class RunCreated(Message):
    """Somebody created a draft."""

    owner: Id
    parent: Id | None = None
    report_every: float = Field(ge=0.2, le=3600, allow_inf_nan=False)
    quorum: int = Field(ge=1, le=10_000)
    created: AwareDatetime
    draft: RunDraftEdited
    join_policy: RunJoinPolicyChanged


class EmptyPayload(Message):
    """The owner requested the launch, or deleted their account with the draft."""


class RunManifestPosted(Message):
    """A worker posted the manifest.

    `compressed` holds the `messages.Signed`, compressed, in base 64. A long manifest consists of
    little but digests.
    """

    text_id: str = Field(pattern=r"^[0-9a-f]{16}$")
    compressed: str = Field(pattern=r"^[0-9A-Za-z+/=]*$", max_length=95_000)


class RunLaunched(Message):
    """The run was launched: `spec` is its final text, `manifest` the digest in it."""

    slug: str = Field(pattern=r"^[0-9A-Za-z_-]{1,100}$")
    name: PlainText = Field(max_length=80)
    spec: DocumentText = Field(max_length=60_000)
    manifest: Digest
    at: AwareDatetime

    @field_validator("spec")
    @classmethod
    def check_spec(cls, spec: str) -> str:
        """Refuse what is not a spec."""
        RunSpec.from_json(spec, is_stored=True)
        return spec


class RunStatusChanged(Message):
    """The run's status changed."""

    status: Status
    epoch: int = Field(ge=0, lt=1 << 31)
    at: AwareDatetime


class RunBudgetExtended(Message):
    """The owner added tokens."""

    tokens: int = Field(ge=1, le=MAX_TOKEN_BUDGET)


class RunArchived(Message):
    """The owner archived the run, or (`at` is None) returned it to the lists."""

    at: AwareDatetime | None


def fold(facts: Sequence[Fact]) -> State | None:
    """Merge the events of a run.

    * Of drafts and join policies the one with the highest version counts, then the latest by (hlc,
      id). An editor states the version that they saw plus one, so a deliberate edit wins over the
      edit that it replaces, whatever the clocks say.
    * The first manifest for the winning text counts; after the launch, the one that the spec pins.
    * Of two launches the first counts: peers validate updates by its spec.
    * The status only climbs (draft, recruiting, training, paused, cancelled, finished) within an
      epoch. The owner's resume raises the epoch: it wins over every pause that they saw, and a late
      "training" undoes no pause. A run that is over is over in every epoch, because machines have
      agreed on the final weights. Finished wins over cancelled, because the weights are safe.
    * The slug is the one of the winning draft. Its claim is as old as the first event with it.
    * Budget extensions add up: each was granted.
    * Of archivings the last counts. A draft that was deleted with its owner's account is deleted
      for good.
    """
    creation = next((fact for fact in facts if fact.action == "create"), None)
    if creation is None or _payloads_of(facts, "delete"):
        return None
    created: RunCreated = creation.payload
    draft: RunDraftEdited = _highest_version(creation, created.draft, facts, "edit")
    policy: RunJoinPolicyChanged = _highest_version(
        creation, created.join_policy, facts, "set_join_policy"
    )
    launch = next(iter(_payloads_of(facts, "launch")), None)
    archived = [payload.at for payload in _payloads_of(facts, "archive")]
    extra_tokens = sum(payload.tokens for payload in _payloads_of(facts, "extend"))
    return {
        "slug_claim": _slug_claim(creation, draft.slug_digest, facts),
        "owner": created.owner,
        "parent": created.parent,
        "report_every": created.report_every,
        "quorum": created.quorum,
        "created": created.created.isoformat(),
        **draft.model_dump(),
        "join_policy": policy.model_dump(),
        "manifest": _fold_manifest(_payloads_of(facts, "post_manifest"), draft, launch),
        "launch_requested": bool(_payloads_of(facts, "request_launch")),
        "launch": launch and launch.model_dump(mode="json"),
        **_fold_lifecycle(_payloads_of(facts, "change_status"), launch),
        "extra_tokens": min(MAX_TOKEN_BUDGET, extra_tokens),
        "archived": archived[-1].isoformat() if archived and archived[-1] else None,
    }


def _payloads_of(facts: Sequence[Fact], action: str) -> list[Any]:
    return [fact.payload for fact in facts if fact.action == action]


def _highest_version(creation: Fact, first: Any, facts: Sequence[Fact], action: str) -> Any:
    versions = [
        (first.version, creation.order_key, first),
        *(
            (fact.payload.version, fact.order_key, fact.payload)
            for fact in facts
            if fact.action == action
        ),
    ]
    return max(versions, key=lambda item: item[:2])[2]


def _slug_claim(creation: Fact, slug_digest: str, facts: Sequence[Fact]) -> list[Any]:
    """Return clock and id of the first event that claims this slug."""
    claims = [
        fact for fact in facts if fact.action == "edit" and fact.payload.slug_digest == slug_digest
    ]
    created_with_it = creation.payload.draft.slug_digest == slug_digest
    first = creation if created_with_it else min(claims, key=lambda fact: fact.order_key)
    return [first.hlc, str(first.id)]


def _fold_manifest(
    posted: list[RunManifestPosted], draft: RunDraftEdited, launch: RunLaunched | None
) -> dict[str, Any] | None:
    for manifest in posted:
        signed = run_events.decompress_manifest(manifest.compressed)
        if signed is None:
            continue
        is_pinned = launch is not None and launch.manifest == digest(signed.body)
        if is_pinned or (launch is None and manifest.text_id == draft.text_id):
            return signed.model_dump()
    return None


def _fold_lifecycle(changes: list[RunStatusChanged], launch: RunLaunched | None) -> State:
    candidates = [(Status.DRAFT, 0), *([(Status.RECRUITING, 0)] if launch else [])]
    candidates += [(change.status, change.epoch) for change in changes]
    status, _ = max(
        candidates,
        key=lambda item: (item[0] in OVER, item[0] in OVER or item[1], RANK.index(item[0])),
    )
    first_at = {change.status: change.at.isoformat() for change in reversed(changes)}
    return {
        "status": status.value,
        "epoch": max(epoch for _, epoch in candidates),
        "started": first_at.get(Status.TRAINING),
        "finished": first_at.get(status) if status in OVER else None,
    }


def unique_values(state: State) -> UniqueValues:
    """Claim the slug."""
    return {"run.slug": (state["slug_digest"], *state["slug_claim"])}


def private_digests(state: State) -> list[str]:
    """Name the private data: slug, name and draft."""
    return [state["content_digest"]]


def store(run_id: str, state: State | None) -> list[str] | None:
    """Write the run's row.

    Returns:
        Names of aggregates that the row would refer to and that do not exist yet.
    """
    if state is None:
        Run.objects.filter(pk=run_id).delete()
        return None
    require_row(User.objects.filter(pk=state["owner"]), f"person:{state['owner']}")
    launch = state["launch"]
    draft = private_data.load(state["content_digest"], run_events.DraftContent)
    if draft is None and launch is None:
        raise DependencyMissingError("its private data")
    content = (draft or {"draft": json.loads(launch["spec"])}) | (launch or {})
    missing: list[str] = []
    columns = _row_columns(state, content, missing)
    columns["slug"] = _resolve_slug(run_id, content["slug"], state["slug_digest"])
    if not Run.objects.filter(pk=run_id).update(**columns):
        Run.objects.bulk_create([Run(pk=run_id, **columns)])
    return missing


def _resolve_slug(run_id: str, slug: str, slug_digest: str) -> str:
    """Lengthen the slug if another run owns it, or the other run's slug if it does not."""
    if not uniqueness.owns_value(f"run:{run_id}", "run.slug", slug_digest):
        slug = f"{slug[:91]}-{UUID(run_id).hex[-8:]}"
    for other in Run.objects.filter(slug=slug).exclude(pk=run_id):
        Run.objects.filter(pk=other.pk).update(slug=f"{other.slug[:91]}-{other.pk.hex[-8:]}")
        uniqueness.mark_for_rewrite(f"run:{other.pk}")
    return slug


def _row_columns(state: State, content: dict[str, Any], missing: list[str]) -> dict[str, Any]:
    policy, launch = state["join_policy"], state["launch"]
    spec_text = launch["spec"] if launch else ""
    team = policy["team"] if policy["access"] == "team" else None
    columns = {
        "name": content["name"],
        "owner_id": state["owner"],
        "status": state["status"],
        "launch_requested": state["launch_requested"],
        "draft": content["draft"],
        "spec_text": spec_text,
        "spec_digest": digest(spec_text) if spec_text else "",
        "manifest": state["manifest"],
        "quorum": state["quorum"],
        "report_every": state["report_every"],
        "extra_tokens": state["extra_tokens"],
        "parent_id": _existing_or_none(missing, "run", Run, state["parent"]),
        "access": policy["access"],
        "visibility": policy["visibility"],
        "min_memory": policy["min_memory"],
        "min_device_memory": policy["min_device_memory"],
        "team_id": _existing_or_none(missing, "team", Team, team),
    }
    for name in ("created", "started", "finished", "archived"):
        columns[name] = state[name] and datetime.fromisoformat(state[name])
    columns["launched"] = launch and datetime.fromisoformat(launch["at"])
    return columns


def _existing_or_none(missing: list[str], kind: str, model: Any, pk: str | None) -> str | None:
    """Return an optional reference if its row exists; otherwise add its name to `missing`."""
    if pk is None or model.objects.filter(pk=pk).exists():
        return pk
    missing.append(f"{kind}:{pk}")
    return None


def existing_events() -> Iterable[EventDraft]:
    """Describe the rows of a site that is older than its log."""
    for run in Run.objects.order_by("created", "pk").iterator():
        for type_, payload in run_events.events_of_existing_run(run):
            yield type_, str(run.pk), payload


AGGREGATE_TYPE = AggregateType(
    "run",
    {
        "create": RunCreated,
        "edit": RunDraftEdited,
        "set_join_policy": RunJoinPolicyChanged,
        "request_launch": EmptyPayload,
        "post_manifest": RunManifestPosted,
        "launch": RunLaunched,
        "change_status": RunStatusChanged,
        "extend": RunBudgetExtended,
        "archive": RunArchived,
        "delete": EmptyPayload,
    },
    fold,
    store,
    unique_values,
    private_digests,
    existing_events,
)
