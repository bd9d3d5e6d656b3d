"""The fields of a run's form that say which weights it begins with."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from django import forms
from django.db.models import Exists, OuterRef

from barnraise.errors import SpecError
from barnraise.spec import MODEL_FOLDER, RunSpec, Start
from coordinator.accounts.models import User
from coordinator.fleet.models import Membership
from coordinator.runs.models import Run
from coordinator.telemetry.checkpoints import Checkpoint, CheckpointHolder
from coordinator.web.run_form_fields import choice_field

RANDOM, OTHER_RUN, MODEL = "random", "run", "model"
KIND_LABELS = {
    RANDOM: "Random weights",
    OTHER_RUN: "Another run",
    MODEL: "A Hugging Face model",
}
START_FIELDS = ("start.kind", "start.checkpoint", "start.model")
MAX_CHECKPOINTS = 50  # to choose from: the newest one of each run


@dataclass(frozen=True)
class ChosenStart:
    """What a run begins with."""

    start: Start = field(default_factory=Start)
    spec_fields: Mapping[str, Any] = field(default_factory=dict)  # fixed by it, by dotted names
    parent: Run | None = None  # whose weights it begins with


def start_fields(owner: User | None, run: Run | None) -> dict[str, forms.Field]:
    """Build the fields. A draft that begins with another run's weights has none: they stay."""
    if run and run.spec.start.run:
        return {}
    labels = dict(KIND_LABELS)
    checkpoints = [] if run or owner is None else _list_checkpoints(owner)
    if not checkpoints:
        del labels[OTHER_RUN]
    fields: dict[str, forms.Field] = {"start.kind": choice_field("Start from", labels)}
    if checkpoints:
        fields["start.checkpoint"] = forms.ChoiceField(
            required=False,
            choices=[("", "–"), *((str(row.pk), _describe(row)) for row in checkpoints)],
            label="Checkpoint",
            help_text="The run gets the model and the tokenizer of the other run.",
        )
    fields["start.model"] = forms.CharField(
        required=False,
        max_length=200,
        label="Model",
        help_text=(
            "A GPT-2 as owner/name (with @revision), or the word "
            f"{MODEL_FOLDER} for one on your own machine. One of your machines converts it before "
            "the launch; the run gets its layers, width, heads, context, vocabulary and tokenizer."
        ),
        widget=forms.TextInput(
            attrs={"placeholder": "openai-community/gpt2", "spellcheck": "false"}
        ),
    )
    return fields


def start_as_typed(spec: RunSpec) -> dict[str, str]:
    """Return a draft's start as form values."""
    kind = MODEL if spec.start.model else RANDOM
    return {"start.kind": kind, "start.model": spec.start.model}


def read_start(values: Mapping[str, Any], owner: User | None) -> ChosenStart:
    """Return what the form chooses.

    Raises:
        SpecError: with a sentence for the field to fill in.
    """
    kind = values.get("start.kind") or RANDOM
    if kind == MODEL:
        model = (values.get("start.model") or "").strip()
        if not model:
            raise SpecError({"start.model": "name the model as owner/name"})
        return ChosenStart(Start(model=model))
    if kind == OTHER_RUN and owner is not None:
        chosen = values.get("start.checkpoint")
        rows = Checkpoint.objects.select_related("run")
        checkpoint = rows.filter(pk=UUID(chosen)).first() if chosen else None
        if checkpoint is None or not checkpoint.run.may_see(owner):
            raise SpecError({"start.checkpoint": "choose a checkpoint"})
        spec = checkpoint.run.spec
        model_fields = {f"model.{k}": v for k, v in dataclasses.asdict(spec.model).items()}
        spec_fields = {**model_fields, "text.tokenizer": spec.text.tokenizer}
        return ChosenStart(checkpoint.to_start(), spec_fields, checkpoint.run)
    return ChosenStart()


def _list_checkpoints(owner: User) -> list[Checkpoint]:
    """List the newest checkpoint of each launched run that a person can see and get now."""
    visible = Run.objects.listed_for(owner).exclude(spec_text="")
    reporting = Membership.everywhere.alive().filter(run__in=visible).values("machine")
    shared = CheckpointHolder.objects.filter(checkpoint=OuterRef("pk"), machine__in=reporting)
    newest = (
        Checkpoint.objects.filter(Exists(shared), run__in=visible)
        .select_related("run")
        .order_by("-run_id", "-tokens", "-pk")
        .distinct("run_id")
    )
    return list(newest[:MAX_CHECKPOINTS])


def _describe(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.run.name}, {checkpoint.tokens:,} tokens ({checkpoint.digest[:12]})"
