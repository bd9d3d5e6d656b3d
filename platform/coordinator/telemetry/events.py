"""Machines coming and going in a run, as their reports tell: one row each time, for the run's page."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from django.db import models
from django.utils import timezone
from uuid6 import uuid7

from barnraise.protocol.enums import Activity, RunStatus
from barnraise.protocol.reports import Report
from coordinator.accounts.models import Machine
from coordinator.fleet.models import Membership
from coordinator.runs.models import Run

AWAY = (Activity.PREPARING, Activity.JOINING, Activity.LEFT)
HERE = (Activity.TRAINING, Activity.PAUSED, Activity.FINISHING)
AWAY_AT_MOST = timedelta(
    minutes=15
)  # between its last report to one mirror and its first to another


class RunEvent(models.Model):
    """A machine `kind` at a moment. Its name is the machine's to keep, and to lose."""

    class Kind(models.TextChoices):
        JOINED = "joined"
        PAUSED = "paused"  # it alone: what a whole run does is in the audit log
        RESUMED = "resumed"
        FINISHED = "finished"  # it holds the final weights
        LEFT = "left"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="events")
    machine = models.ForeignKey(Machine, on_delete=models.CASCADE, related_name="+")
    kind = models.CharField(max_length=10, choices=Kind)
    at = models.DateTimeField(default=timezone.now)
    mirror = models.CharField(
        max_length=64, blank=True, default="", db_default=""
    )  # whose word it is; "": ours
    changed = models.BigIntegerField(
        null=True, default=0, db_default=0
    )  # see `moments`; null: not ours to tell

    class Meta:
        ordering = ["-at", "-id"]
        indexes = [
            models.Index(fields=["run", "-at"], name="events_of_a_run"),
            models.Index(fields=["at"], name="events_by_age"),
            models.Index(
                fields=["changed", "id"],
                condition=models.Q(changed__isnull=False),
                name="events_to_tell",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.machine} {self.kind}"


def detect_events(
    member: Membership, reports: Sequence[Report], at: Sequence[float], moment: int
) -> list[RunEvent]:
    """What these reports of one machine tell beyond what was known, `reports` ascending by seq, each measured `at` so
    many seconds since 1970; asked before the reports' numbers are taken over. To be saved, as of this `moment`."""
    known, found = member.activity, []
    for report, when in zip(reports, at, strict=True):
        if (
            report.seq > member.latest
        ):  # one that fills a gap says what the machine did before what is known
            if kind := event_kind_of_change(known, report.activity, member.run.state):
                found.append(_event(member, kind, when, moment))
            known = report.activity
    if found and found[0].kind == RunEvent.Kind.RESUMED and not _rested(member):
        del found[0]  # the whole run rested, and it with it
    return found


def event_kind_of_change(before: str, after: str, run: RunStatus) -> RunEvent.Kind | None:
    """What it is called that a machine went from one activity to another, while its run was in this state."""
    if before == after:
        return None
    if before in AWAY and after in HERE:
        return RunEvent.Kind.JOINED
    if after == Activity.PAUSED and run is RunStatus.TRAINING:
        return RunEvent.Kind.PAUSED
    if before == Activity.PAUSED and after == Activity.TRAINING:
        return RunEvent.Kind.RESUMED
    return {Activity.FINISHED: RunEvent.Kind.FINISHED, Activity.LEFT: RunEvent.Kind.LEFT}.get(after)


def _event(member: Membership, kind: RunEvent.Kind, at: float, moment: int) -> RunEvent:
    when = datetime.fromtimestamp(at, UTC)
    return RunEvent(
        run=member.run, machine_id=member.machine_id, kind=kind, at=when, changed=moment
    )


def drop_mirror_moves(found: list[RunEvent]) -> list[RunEvent]:
    """Without those of machines that were at work all along, and joined nothing but this mirror. One question."""
    joined = {
        (event.run_id, event.machine_id): event
        for event in reversed(found)
        if event.kind == RunEvent.Kind.JOINED
    }
    if not joined:
        return found
    elsewhere = Membership.everywhere.exclude(mirror="").filter(
        run__in={run for run, _ in joined}, machine__in={machine for _, machine in joined},
        activity__in=HERE, heard__gt=timezone.now() - AWAY_AT_MOST,
    )  # fmt: skip
    moved = {
        joined[place].pk for place in elsewhere.values_list("run", "machine") if place in joined
    }
    return [event for event in found if event.pk not in moved]


def _rested(member: Membership) -> bool:
    last = (
        RunEvent.objects.filter(run=member.run, machine=member.machine_id)
        .values_list("kind", flat=True)
        .first()
    )
    return last == RunEvent.Kind.PAUSED
