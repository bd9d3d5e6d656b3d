"""Samples: short texts that machines wrote with a run's weights, for the run's page.

A stranger's machine could report any text. So only texts of machines are shown whose owners' word
counts in this run: the run's owner, and people whose updates others vouch for.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING
from uuid import UUID

from django.db import models
from django.utils import timezone

from barnraise.protocol.reports import SAMPLE_LENGTH, Report
from barnraise.spec import MAX_PROMPTS
from coordinator.accounts.models import Machine
from coordinator.fleet.models import Membership
from coordinator.fleet.witnesses import vouched_people
from coordinator.runs.models import Run

POSITIONS_SHOWN = 10  # checkpoints whose samples the page shows
MAX_SAMPLES = 500  # of a run; the oldest are deleted, those of people whose word counts last
SAMPLING_REPORTS = 50  # of one machine's reports in a batch, whose samples are stored


class WrittenSample(models.Model):
    """What a machine wrote after a prompt; `prompt` is its index in the run's spec."""

    if TYPE_CHECKING:
        run_id: UUID
        machine_id: UUID

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="samples")
    machine = models.ForeignKey(Machine, on_delete=models.CASCADE, related_name="+")
    tokens = models.BigIntegerField()  # of the ledger, when it was written
    prompt = models.PositiveSmallIntegerField()
    text = models.CharField(max_length=SAMPLE_LENGTH)
    at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run", "machine", "tokens", "prompt"], name="one_sample_a_place"
            )
        ]
        indexes = [models.Index(fields=["run", "-tokens"], name="samples_of_a_run")]

    def __str__(self) -> str:
        return f"sample {self.prompt} at {self.tokens:,} tokens"


@dataclass(frozen=True)
class SampleGroup:
    """The samples that one machine wrote at one position of the ledger."""

    tokens: int  # the position
    machine: str  # its name
    at: datetime  # when they were reported
    texts: tuple[tuple[str, str], ...]  # (prompt, what was written after it), in the prompts' order


def record_samples(received: Iterable[tuple[Membership, list[Report]]]) -> None:
    """Store the samples in reports; a report that arrives twice changes nothing."""
    rows = [
        WrittenSample(
            run_id=member.run_id,
            machine_id=member.machine_id,
            tokens=report.samples.tokens,
            prompt=sample.prompt,
            text=sample.text,
        )
        for member, reports in received
        for report in [r for r in reports if r.samples][-SAMPLING_REPORTS:]
        if report.samples and report.samples.tokens <= member.run.max_plausible_tokens
        for sample in report.samples.texts
        if sample.prompt < len(member.run.spec.prompts)
    ]
    if rows:
        WrittenSample.objects.bulk_create(rows, ignore_conflicts=True)


def list_sample_groups(run: Run, most: int = POSITIONS_SHOWN) -> list[SampleGroup]:
    """List a run's samples, the newest position first, by two queries; none without prompts."""
    prompts = run.spec.prompts
    if not prompts:
        return []
    people = {run.owner_id, *vouched_people(run)}
    rows = (
        WrittenSample.objects.filter(run=run, machine__owner__in=people)
        .select_related("machine")
        .order_by("-tokens", "machine_id", "prompt")[: most * MAX_PROMPTS]
    )
    by_position: dict[int, list[WrittenSample]] = {}
    for row in rows:
        group = by_position.setdefault(row.tokens, [])
        if not group or group[0].machine_id == row.machine_id:  # one machine for each position
            group.append(row)
    return [
        SampleGroup(
            tokens,
            group[0].machine.name,
            group[0].at,
            tuple((prompts[row.prompt], row.text) for row in group if row.prompt < len(prompts)),
        )
        for tokens, group in list(by_position.items())[:most]
    ]


def prune_samples(run: Run) -> int:
    """Delete a run's oldest samples beyond `MAX_SAMPLES`; return how many."""
    people = {run.owner_id, *vouched_people(run)}
    is_shown = models.Case(models.When(machine__owner__in=people, then=1), default=0)
    newest = run.samples.annotate(is_shown=is_shown).order_by("-is_shown", "-tokens", "-pk")
    beyond = newest.values("pk")[MAX_SAMPLES:]
    return WrittenSample.objects.filter(pk__in=list(beyond.values_list("pk", flat=True))).delete()[
        0
    ]
