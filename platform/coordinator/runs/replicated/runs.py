"""The kind "run": what it is, who may join, where it is in its life. A draft is its owner's alone, and goes with them:
its name and text are in particulars until the launch makes them public. Notes stay with the mirror they were written
at; what machines report is each mirror's to gather."""

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import AwareDatetime, Field, field_validator

from barnraise.protocol import enums
from barnraise.protocol.signing import digest
from barnraise.protocol.types import Digest, Id, Message, PlainText
from barnraise.spec import RunSpec
from coordinator.accounts.models import Team, User
from coordinator.eventlog import private_data, uniqueness
from coordinator.eventlog.registry import (
    AggregateType,
    DependencyMissingError,
    EventDraft,
    Fact,
    State,
)
from coordinator.eventlog.registry import UniqueValues as Claimed
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
    """`about`: the digest of slug, name and draft. `text`: drawn anew whenever the text to be prepared is another; a
    manifest names it."""

    version: int = Field(ge=0, lt=1 << 31)
    about: Digest
    text: str = Field(pattern=r"^[0-9a-f]{16}$")


class RunJoinPolicyChanged(Message):
    version: int = Field(ge=0, lt=1 << 31)
    access: Literal["anyone", "invitation", "team"] = "anyone"
    least_memory: int = Field(default=0, ge=0, le=MAX_MEMORY_BYTES)
    least_device_memory: int = Field(default=0, ge=0, le=MAX_MEMORY_BYTES)
    team: Id | None = None


class RunCreated(Message):
    word: Digest
    owner: Id
    parent: Id | None = None
    report_every: float = Field(ge=0.2, le=3600, allow_inf_nan=False)
    quorum: int = Field(ge=1, le=10_000)
    created: AwareDatetime
    settings: RunDraftEdited
    terms: RunJoinPolicyChanged


class EmptyPayload(Message):
    pass


class RunManifestPosted(Message):
    """`packed`: the signed manifest (`wire.Signed`), deflated, in base 64; a long one is digests and little else."""

    text: str = Field(pattern=r"^[0-9a-f]{16}$")
    packed: str = Field(max_length=95_000)


class RunLaunched(Message):
    """`spec` is the exact text that never changes again; `manifest` the digest it pins."""

    slug: str = Field(pattern=r"^[0-9A-Za-z_-]{1,100}$")
    name: PlainText = Field(max_length=80)
    spec: str = Field(max_length=60_000)
    manifest: Digest
    at: AwareDatetime

    @field_validator("spec")
    @classmethod
    def sensible(cls, spec: str) -> str:
        RunSpec.from_json(spec)
        return spec


class RunStatusChanged(Message):
    status: Status
    epoch: int = Field(ge=0, lt=1 << 31)
    at: AwareDatetime


class RunBudgetExtended(Message):
    tokens: int = Field(ge=1, le=MAX_TOKEN_BUDGET)


class RunArchived(Message):
    at: AwareDatetime | None


def fold(facts: Sequence[Fact]) -> State | None:
    """* Settings, and terms, count by version, then by (hlc, id): who edits states the version they saw plus one, so an
      edit made with another in view wins over it whatever the clocks say; two made blindly are told apart alike.
    * The first manifest of the winning text counts, as it did where it was posted; after the launch, the one it pins.
    * Of two launches the first: peers judge updates by its spec.
    * Status only climbs (draft, recruiting, training, paused, cancelled, finished) within an epoch. The owner's
      "resume" raises the epoch: it wins over every pause it knew of, and no late "training" undoes a pause. What is
      over is over in every epoch: machines agreed on final weights. Finished beats cancelled: the weights are safe.
    * Budget extensions add up: each was granted.
    * What is archived goes by the last word. A draft that went with its owner is gone for good."""
    made = next((fact for fact in facts if fact.action == "create"), None)
    if made is None or any(fact.action == "forget" for fact in facts):
        return None
    create: RunCreated = made.payload
    settings: RunDraftEdited = _newest(
        made, create.settings, [fact for fact in facts if fact.action == "edit"]
    )
    terms: RunJoinPolicyChanged = _newest(
        made, create.terms, [fact for fact in facts if fact.action == "arrange"]
    )
    launch = next((fact.payload for fact in facts if fact.action == "launch"), None)
    archived = [fact.payload.at for fact in facts if fact.action == "archive"]
    return {
        "word": create.word,
        "born": [made.hlc, str(made.id)],
        "owner": create.owner,
        "parent": create.parent,
        "report_every": create.report_every,
        "quorum": create.quorum,
        "created": create.created.isoformat(),
        **settings.model_dump(),
        "terms": terms.model_dump(),
        "manifest": _manifest(
            [fact.payload for fact in facts if fact.action == "manifest"], settings, launch
        ),
        "requested": any(fact.action == "request" for fact in facts),
        "launch": launch and launch.model_dump(mode="json"),
        **_life([fact.payload for fact in facts if fact.action == "becomes"], launch),
        "extra": min(
            MAX_TOKEN_BUDGET, sum(fact.payload.tokens for fact in facts if fact.action == "extend")
        ),
        "archived": archived[-1].isoformat() if archived and archived[-1] else None,
    }


def _newest(made: Fact, first: Any, changes: list[Fact]) -> Any:
    said = [
        (first.version, made.order_key, first),
        *((fact.payload.version, fact.order_key, fact.payload) for fact in changes),
    ]
    return max(said, key=lambda each: each[:2])[2]


def _manifest(
    posted: list[RunManifestPosted], settings: RunDraftEdited, launch: RunLaunched | None
) -> dict | None:
    for each in posted:
        signed = run_events.unpack_manifest(each.packed)
        if signed and (
            launch.manifest == digest(signed.body) if launch else each.text == settings.text
        ):
            return signed.model_dump()
    return None


def _life(told: list[RunStatusChanged], launch: RunLaunched | None) -> State:
    known = [(Status.DRAFT, 0), *([(Status.RECRUITING, 0)] if launch else [])]
    known += [(each.status, each.epoch) for each in told]
    status, _ = max(
        known, key=lambda each: (each[0] in OVER, each[0] in OVER or each[1], RANK.index(each[0]))
    )
    first = {each.status: each.at.isoformat() for each in reversed(told)}
    return {
        "status": status.value,
        "epoch": max(epoch for _, epoch in known),
        "started": first.get(Status.TRAINING),
        "finished": first.get(status) if status in OVER else None,
    }


def unique_values(state: State) -> Claimed:
    return {"run.slug": (state["word"], *state["born"])}


def private_digests(state: State) -> list[str]:
    return [state["about"]]


def store(which: str, state: State | None) -> list[str] | None:
    if state is None:
        Run.objects.filter(pk=which).delete()
        return None
    if not User.objects.filter(pk=state["owner"]).exists():
        raise DependencyMissingError(f"person:{state['owner']}")
    terms, launch, about = (
        state["terms"],
        state["launch"],
        private_data.load(state["about"], run_events.DraftContent),
    )
    if about is None and launch is None:
        raise DependencyMissingError("its particulars")
    about = (about or {"draft": json.loads(launch["spec"])}) | (launch or {})
    slug, spec = about["slug"], launch["spec"] if launch else ""
    if not uniqueness.owns_value(f"run:{which}", "run.slug", state["word"]):
        slug = f"{slug[:91]}-{UUID(which).hex[-8:]}"
    for other in Run.objects.filter(slug=slug).exclude(pk=which):
        Run.objects.filter(pk=other.pk).update(slug=f"{other.slug[:91]}-{other.pk.hex[-8:]}")
        uniqueness.mark_for_rewrite(f"run:{other.pk}")
    lacks: list[str] = []
    team = terms["team"] if terms["access"] == "team" else None
    fields = {
        "slug": slug,
        "name": about["name"],
        "owner_id": state["owner"],
        "status": state["status"],
        "launch_requested": state["requested"],
        "draft": about["draft"],
        "spec_text": spec,
        "spec_digest": digest(spec) if spec else "",
        "manifest": state["manifest"],
        "quorum": state["quorum"],
        "report_every": state["report_every"],
        "extra_tokens": state["extra"],
        "parent_id": _known(lacks, "run", Run, state["parent"]),
        "access": terms["access"],
        "least_memory": terms["least_memory"],
        "least_device_memory": terms["least_device_memory"],
        "team_id": _known(lacks, "team", Team, team),
    }
    for name in ("created", "started", "finished", "archived"):
        fields[name] = state[name] and datetime.fromisoformat(state[name])
    fields["launched"] = launch and datetime.fromisoformat(launch["at"])
    if not Run.objects.filter(pk=which).update(**fields):
        Run.objects.bulk_create([Run(pk=which, **fields)])
    return lacks


def _known(lacks: list[str], kind: str, model: Any, pk: str | None) -> str | None:
    """What a run can do without: named while it is there."""
    if pk is None or model.objects.filter(pk=pk).exists():
        return pk
    lacks.append(f"{kind}:{pk}")
    return None


def existing_events() -> Iterable[EventDraft]:
    for run in Run.objects.order_by("created", "pk").iterator():
        yield from (
            (type, str(run.pk), said) for type, said in run_events.events_of_existing_run(run)
        )


AGGREGATE_TYPE = AggregateType(
    "run",
    {
        "create": RunCreated, "edit": RunDraftEdited, "arrange": RunJoinPolicyChanged, "request": EmptyPayload, "manifest": RunManifestPosted,
        "launch": RunLaunched, "becomes": RunStatusChanged, "extend": RunBudgetExtended, "archive": RunArchived, "forget": EmptyPayload,
    },
    fold, store, unique_values, private_digests, existing_events,
)  # fmt: skip
