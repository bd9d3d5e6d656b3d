"""Checkpoints: which shared weights machines say they hold, by digest and never by byte, and who else says the same.

A machine announces those it made at the run's milestones and at its end; every report that names the same weights at
the same updates confirms them. Two digests at one version vector mean that somebody is wrong: both are shown.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from django.db import models, transaction
from django.utils import timezone
from uuid6 import uuid7

from barnraise.protocol import coordinator_messages, messages
from barnraise.protocol import reports as reports_module
from barnraise.spec import Start
from coordinator.accounts.models import Machine
from coordinator.eventlog import writer as mirrors
from coordinator.fleet.models import Membership
from coordinator.runs.models import Run

ROWS_SHOWN = 20  # on the run's page
MAX_CHECKPOINTS = 500  # a run: past that the oldest that nobody else confirmed are forgotten


class Checkpoint(models.Model):
    """`vector` names the updates in it, `digest` is the BLAKE3 of its `size` bytes, `checksum` its sketch."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="checkpoints")
    tokens = models.BigIntegerField()
    vector = models.CharField(max_length=64)
    digest = models.CharField(max_length=64)
    checksum = models.CharField(max_length=16)
    size = models.BigIntegerField()
    announced = models.DateTimeField(default=timezone.now)
    told = models.BooleanField(default=False)  # to other mirrors

    class Meta:
        ordering = ["-tokens", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["run", "vector", "digest"], name="one_checkpoint_a_digest"
            )
        ]
        indexes = [models.Index(fields=["run", "-tokens"], name="checkpoints_of_a_run")]

    def __str__(self) -> str:
        return f"{self.digest[:12]} at {self.tokens:,} tokens"

    @property
    def aggregate_name(self) -> str:
        """By which mirrors know it."""
        return f"{self.run_id}:{self.vector}:{self.digest}"

    def to_start(self) -> Start:
        """For a run that begins here."""
        manifest = coordinator_messages.TextManifest.model_validate_json(
            messages.Signed.model_validate(self.run.manifest).body
        )
        return Start(str(self.run_id), self.digest, self.tokens, manifest.tokenizer or "")


class CheckpointHolder(models.Model):
    """A machine said that it had exactly these weights."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    checkpoint = models.ForeignKey(Checkpoint, on_delete=models.CASCADE, related_name="holdings")
    machine = models.ForeignKey(Machine, on_delete=models.CASCADE, related_name="+")
    said = models.DateTimeField(default=timezone.now)
    told = models.BooleanField(default=False)  # to other mirrors

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["checkpoint", "machine"], name="one_holding_a_machine")
        ]

    def __str__(self) -> str:
        return f"{self.machine} has {self.checkpoint}"


def record_announcements(heard: Iterable[tuple[Membership, list[reports_module.Report]]]) -> None:
    """What these reports of machines announce, and confirm. Twice says no more than once, and costs nothing: every
    report carries the last announcement."""
    wanted: dict[tuple, list[Membership]] = {}  # (run, vector, digest) → who names it
    for member, reports in heard:
        said = {
            r.checkpoint
            for r in reports
            if r.checkpoint and 0 < r.checkpoint.tokens <= member.run.max_plausible_tokens
        }
        named = {(view.vector, view.digest) for view in said} | {
            (r.vector, r.anchor) for r in reports if r.anchor
        }
        named = {pair for pair in named if (member.pk, *pair) not in _noted}
        for view in said:
            if (view.vector, view.digest) in named:
                Checkpoint.objects.get_or_create(
                    run=member.run,
                    vector=view.vector,
                    digest=view.digest,
                    defaults={"tokens": view.tokens, "checksum": view.checksum, "size": view.size},
                )
        for pair in named:
            wanted.setdefault((member.run_id, *pair), []).append(member)
    if not wanted:
        return
    known = Checkpoint.objects.filter(
        run__in={run for run, _, _ in wanted}, vector__in={v for _, v, _ in wanted}
    )
    held = [
        (member, each)
        for each in known
        for member in wanted.get((each.run_id, each.vector, each.digest), ())
    ]
    CheckpointHolder.objects.bulk_create(
        [CheckpointHolder(checkpoint=each, machine_id=member.machine_id) for member, each in held],
        ignore_conflicts=True,
    )
    transaction.on_commit(
        lambda: _remember((member.pk, each.vector, each.digest) for member, each in held)
    )


_noted: dict[
    tuple[UUID, str, str], None
] = {}  # what this process has seen committed, the oldest first
NOTED = 50_000


def _remember(pairs: Iterable[tuple[UUID, str, str]]) -> None:
    for pair in pairs:
        _noted[pair] = None
    while len(_noted) > NOTED:
        del _noted[next(iter(_noted))]


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint as pages and the API show it. `others`: at the same updates, with other weights."""

    checkpoint: Checkpoint
    machines: int
    people: int
    holders: tuple[str, ...]  # machines' names, those that can still be asked first
    alive: int  # of them
    others: int

    @property
    def confirmed(self) -> bool:
        """Whether machines of two people say the same, and none otherwise."""
        return self.people > 1 and not self.others


def list_checkpoint_rows(run: Run, most: int = ROWS_SHOWN) -> list[CheckpointRow]:
    """The newest first; four queries however many there are."""
    found = list(run.checkpoints.all()[:most])
    holdings = (
        CheckpointHolder.objects.filter(checkpoint__in=found)
        .select_related("machine")
        .order_by("said", "pk")
    )
    here = set(Membership.everywhere.alive().filter(run=run).values_list("machine_id", flat=True))
    by: dict[object, list[Machine]] = {each.pk: [] for each in found}
    for holding in holdings:
        by[holding.checkpoint_id].append(holding.machine)
    vectors = [
        each.vector for each in run.checkpoints.filter(vector__in={each.vector for each in found})
    ]
    told = []
    for each in found:
        machines = sorted(by[each.pk], key=lambda machine: machine.pk not in here)
        people = {machine.owner_id for machine in machines}
        names = tuple(machine.name for machine in machines)
        alive = sum(machine.pk in here for machine in machines)
        told.append(
            CheckpointRow(
                each, len(machines), len(people), names, alive, vectors.count(each.vector) - 1
            )
        )
    return told


def prune_checkpoints(run: Run) -> int:
    """Of a run with more than KEPT checkpoints, the oldest beyond them that only one machine ever spoke of."""
    beyond = run.checkpoints.order_by("-tokens", "-pk").values("pk")[MAX_CHECKPOINTS:]
    alone = (
        Checkpoint.objects.filter(pk__in=beyond)
        .annotate(count=models.Count("holdings"))
        .filter(count__lt=2)
    )
    gone = 0
    for checkpoint in alone:
        with mirrors.log_transaction():
            place, told = checkpoint.aggregate_name, checkpoint.told
            gone += checkpoint.delete()[0]
            if told:
                mirrors.record("checkpoint.forget", place, {})
    return gone
