"""Record when machines join, pause, finish and leave a run, for the run's page."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from django.db import models
from django.utils import timezone
from uuid6 import uuid7

from barnraise.protocol.enums import Activity, PauseReason, RunStatus
from barnraise.protocol.reports import Report
from coordinator.accounts.models import Machine
from coordinator.fleet.models import Membership
from coordinator.runs.models import Run

AWAY = (Activity.PREPARING, Activity.JOINING, Activity.LEFT, Activity.FETCHING)
HERE = (Activity.TRAINING, Activity.PAUSED, Activity.SUSPENDED, Activity.FINISHING)
# A machine that changes mirrors reports to the new one within this time.
AWAY_AT_MOST = timedelta(minutes=15)


class RunEvent(models.Model):
    """A machine did `kind` at some time. Its name is not copied: it may change or be deleted."""

    if TYPE_CHECKING:
        run_id: UUID
        machine_id: UUID

    class Kind(models.TextChoices):
        """What a machine did."""

        JOINED = "joined"
        PAUSED = "paused"  # this machine alone; the audit log has pauses of runs
        RESUMED = "resumed"
        FINISHED = "finished"
        LEFT = "left"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="events")
    machine = models.ForeignKey(Machine, on_delete=models.CASCADE, related_name="+")
    kind = models.CharField(max_length=10, choices=Kind)
    # Of a pause: a `PauseReason`; "" from machines of older versions.
    reason = models.CharField(max_length=20, blank=True, default="", db_default="")
    at = models.DateTimeField(default=timezone.now)
    mirror = models.CharField(max_length=64, blank=True, default="", db_default="")  # "": this site
    # See `rollup.next_change_stamp`; null on another mirror's row.
    changed = models.BigIntegerField(null=True, default=0, db_default=0)

    class Meta:
        ordering = ["-at", "-id"]
        indexes = [
            models.Index(fields=["run", "-at"], name="events_of_a_run"),
            models.Index(fields=["at"], name="events_by_age"),
            models.Index(
                fields=["changed", "id"],
                condition=models.Q(changed__isnull=False),
                name="events_to_publish",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.machine} {self.kind}"


# Of one machine in a run, within the time that events are kept: one that states another activity in
# each report would fill the feed and the database.
MAX_OF_MACHINE = 2000


def detect_events(
    member: Membership, reports: Sequence[Report], at: Sequence[float], stamp: int
) -> list[RunEvent]:
    """Return the events that a machine's reports imply, not saved yet.

    It must run before the reports' figures are stored in the membership. The reports ascend; `at`
    is when each was measured, in seconds since 1970.
    """
    activity = member.activity
    events: list[RunEvent] = []
    for report, when in zip(reports, at, strict=True):
        # A report that fills a gap is older than the activity that is known.
        if report.seq > member.latest:
            reason = report.pause.reason if report.pause else None
            kind = event_kind_of_change(activity, report.activity, member.run.state, reason)
            if kind:
                events.append(_build_event(member, kind, when, stamp))
                if kind == RunEvent.Kind.PAUSED and reason is not None:
                    events[-1].reason = reason.value
            activity = report.activity
    if events and events[0].kind == RunEvent.Kind.RESUMED and not _was_paused(member):
        del events[0]  # the whole run was paused, not this machine
    return events


def drop_surplus(events: list[RunEvent]) -> list[RunEvent]:
    """Drop events of machines that have `MAX_OF_MACHINE` in a run, by one query."""
    if not events:
        return events
    stored = RunEvent.objects.filter(
        run__in={event.run_id for event in events},
        machine__in={event.machine_id for event in events},
    )
    rows = stored.order_by().values_list("run", "machine").annotate(count=models.Count("pk"))
    counts = {(run, machine): count for run, machine, count in rows}
    kept: list[RunEvent] = []
    for event in events:
        place = event.run_id, event.machine_id
        counts[place] = counts.get(place, 0) + 1
        if counts[place] <= MAX_OF_MACHINE:
            kept.append(event)
    return kept


def event_kind_of_change(
    before: str, after: str, run: RunStatus, reason: PauseReason | None = None
) -> RunEvent.Kind | None:
    """Return the event that a change of activity means; None for none.

    The pause of a whole run is its owner's event. What the site knows of the run may be newer than
    the machine's report, so the machine's own reason counts first.
    """
    if before == after:
        return None
    if before in AWAY and after in HERE:
        return RunEvent.Kind.JOINED
    if after == Activity.PAUSED and reason is not None:
        return RunEvent.Kind.PAUSED if reason.concerns_one_machine else None
    if after == Activity.PAUSED and run is RunStatus.TRAINING:
        return RunEvent.Kind.PAUSED
    if before == Activity.PAUSED and after == Activity.TRAINING:
        return RunEvent.Kind.RESUMED
    if after == Activity.FINISHED:
        return RunEvent.Kind.FINISHED
    return RunEvent.Kind.LEFT if after == Activity.LEFT else None


def _build_event(member: Membership, kind: RunEvent.Kind, at: float, stamp: int) -> RunEvent:
    when = datetime.fromtimestamp(at, UTC)
    return RunEvent(run=member.run, machine_id=member.machine_id, kind=kind, at=when, changed=stamp)


def drop_mirror_moves(events: list[RunEvent]) -> list[RunEvent]:
    """Drop joins of machines that trained all along and only changed mirrors, by one query."""
    joined = {
        (event.run_id, event.machine_id): event
        for event in reversed(events)
        if event.kind == RunEvent.Kind.JOINED
    }
    if not joined:
        return events
    elsewhere = Membership.everywhere.exclude(mirror="").filter(
        run__in={run for run, _ in joined},
        machine__in={machine for _, machine in joined},
        activity__in=HERE,
        last_report__gt=timezone.now() - AWAY_AT_MOST,
    )
    moved = {
        joined[place].pk for place in elsewhere.values_list("run", "machine") if place in joined
    }
    return [event for event in events if event.pk not in moved]


def _was_paused(member: Membership) -> bool:
    """Return whether the machine's last event was a pause."""
    last = (
        RunEvent.objects.filter(run=member.run, machine=member.machine_id)
        .values_list("kind", flat=True)
        .first()
    )
    return last == RunEvent.Kind.PAUSED
