"""A machine's membership in a run."""

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

from django.db import models
from django.db.models import Exists, ExpressionWrapper, F, OuterRef, Q, Value
from django.db.models.functions import Greatest
from django.utils import timezone
from uuid6 import uuid7

from barnraise.protocol.enums import Activity, PauseReason
from barnraise.protocol.reports import NO_FIGURES, MachineFigures
from coordinator.accounts.models import Machine
from coordinator.fleet.machine_state import HardwareMeasurement as HardwareMeasurement
from coordinator.fleet.machine_state import MachinePause as MachinePause
from coordinator.fleet.pause_texts import PAUSE_TEXTS
from coordinator.fleet.verdict_models import RunExclusion as RunExclusion
from coordinator.fleet.verdict_models import VerdictRecord as VerdictRecord
from coordinator.fleet.witness_models import UpdateWitness as UpdateWitness
from coordinator.fleet.witness_models import VouchedAuthor as VouchedAuthor
from coordinator.runs.models import Run

# A machine counts as gone when it has missed so many reports and these seconds have passed as well.
MAX_MISSED_REPORTS = 3
GRACE_SECONDS = 5.0
MAX_INTERVAL_SECONDS = 3600.0  # between two reports
LONGEST_SILENCE = timedelta(seconds=MAX_MISSED_REPORTS * MAX_INTERVAL_SECONDS + GRACE_SECONDS)
NOT_AT_WORK = (Activity.LEFT, Activity.FETCHING)
NEVER = datetime(1970, 1, 1, tzinfo=UTC)


class MembershipQuerySet(models.QuerySet["Membership"]):
    """Memberships, here or at all mirrors."""

    def alive(self) -> "MembershipQuerySet":
        """Select machines that report, are not revoked and have not left."""
        return self._not_silent(F("run__report_every")).exclude(activity__in=NOT_AT_WORK)

    def alive_in(self, run: Run) -> "MembershipQuerySet":
        """Select those that are alive in one run, without a join with runs."""
        return self.reachable_in(run).exclude(activity=Activity.FETCHING)

    def reachable_in(self, run: Run) -> "MembershipQuerySet":
        """Select those that peers in one run can connect to, also those that only download."""
        mine = self.filter(run=run)._not_silent(Value(run.report_every))
        return mine.exclude(activity=Activity.LEFT)

    def _not_silent(self, report_every: Any) -> "MembershipQuerySet":
        """Select machines whose next report is not long overdue, and that are not revoked."""
        interval = Greatest(report_every, F("report_interval"))
        silence = ExpressionWrapper(
            interval * MAX_MISSED_REPORTS * timedelta(seconds=1) + timedelta(seconds=GRACE_SECONDS),
            output_field=models.DurationField(),
        )
        now = timezone.now()
        since = ExpressionWrapper(now - silence, output_field=models.DateTimeField())
        # The first condition lets Postgres use the index.
        return self.filter(last_seen__gt=now - LONGEST_SILENCE, machine__revoked=None).filter(
            last_seen__gt=since
        )

    def newest(self) -> "MembershipQuerySet":
        """Select, of several mirrors' rows of one machine in a run, the one with the latest report.

        Of two rows with the same time this site's own is selected.
        """
        later = Q(last_report__gt=OuterRef("last_report")) | Q(
            last_report=OuterRef("last_report"), mirror__lt=OuterRef("mirror")
        )
        others = Membership.everywhere.filter(
            later, run=OuterRef("run"), machine=OuterRef("machine")
        )
        return self.filter(~Exists(others))


class LocalMembershipManager(models.Manager.from_queryset(MembershipQuerySet)):
    """Memberships whose reports this site received itself."""

    def get_queryset(self) -> Any:
        """Leave out other mirrors' rows."""
        return super().get_queryset().filter(mirror="")


class Membership(models.Model):
    """A machine in a run, with the numbers of its latest report that Postgres holds.

    A row with a `mirror` (its key) holds what was reported to that mirror. `objects` are this
    site's own rows, `everywhere` are all rows, and `newest` selects one for each machine.
    """

    if TYPE_CHECKING:
        run_id: UUID
        machine_id: UUID
        receipts: Any
        has_verdicts: bool  # set by `report_queries.membership_for_run`

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="memberships")
    machine = models.ForeignKey(Machine, on_delete=models.CASCADE, related_name="memberships")
    mirror = models.CharField(max_length=64, blank=True, default="", db_default="")
    joined = models.DateTimeField(default=timezone.now)
    # When the site last received anything from the machine, and when its last report.
    last_seen = models.DateTimeField(default=timezone.now)
    last_report = models.DateTimeField(default=NEVER, db_default=NEVER)
    # Seconds from the last report to the next one, as the site answered it; 0 if it did not.
    report_interval = models.FloatField(default=0, db_default=0)
    addresses = models.JSONField(default=list)  # as the machine reports them
    # The address that its requests come from, which proves one of `addresses`.
    source_address = models.CharField(max_length=45, blank=True, default="", db_default="")
    version = models.CharField(max_length=40, blank=True)
    activity = models.CharField(
        max_length=10, choices=[(a.value, a.value) for a in Activity], default="joining"
    )
    incarnation = models.CharField(max_length=16, blank=True)
    # Whether it has ever joined as a member of a crew, whose lead's updates then credit it.
    in_crew = models.BooleanField(default=False, db_default=False)
    # Each incarnation of the machine in this run → how many updates it has published.
    updates_by_incarnation = models.JSONField(default=dict)
    ticket_expires = models.DateTimeField(null=True)
    # Of the last ticket: the tokens per second that the machine's updates may state.
    max_tokens_per_second = models.BigIntegerField(default=0)
    # Steps of the worker's process whose loss or gradient was not finite.
    abandoned_steps = models.BigIntegerField(default=0, db_default=0)
    tokens = models.BigIntegerField(default=0)
    ledger_tokens = models.BigIntegerField(default=0)
    rate = models.FloatField(default=0)
    updates_sent = models.BigIntegerField(default=0)
    updates_received = models.BigIntegerField(default=0)
    peer_bytes_sent = models.BigIntegerField(default=0)
    peer_bytes_received = models.BigIntegerField(default=0)
    exchange: Any = models.JSONField(null=True)  # the last `reports.ExchangeView`
    # The other figures of `reports.MachineFigures`: no query selects or sums them.
    figures: Any = models.JSONField(default=dict)
    # When the machine first reported that it holds the whole final checkpoint.
    final_checkpoint_at = models.DateTimeField(null=True)
    # High-water mark: Postgres holds every report up to this number.
    high_water_mark = models.BigIntegerField(default=0)
    latest = models.BigIntegerField(default=0)  # the number of the report these figures are from
    # The change stamp for other mirrors (`rollup.next_change_stamp`); null on another mirror's row.
    changed = models.BigIntegerField(null=True, default=0, db_default=0)
    # The change stamp at which the plan last became another one.
    planned = models.BigIntegerField(default=0, db_default=0)

    objects: ClassVar[Any] = LocalMembershipManager()
    everywhere: ClassVar[Any] = MembershipQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run", "machine", "mirror"], name="one_membership_a_mirror"
            )
        ]
        indexes = [
            models.Index(fields=["run", "last_seen"]),
            models.Index(
                fields=["changed", "id"],
                condition=Q(changed__isnull=False),
                name="memberships_to_publish",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.machine} in {self.run}"

    def update_figures(self, values: dict[str, Any]) -> None:
        """Set figures by their names: those with a column of their own, and the others."""
        for name in FIGURE_COLUMNS & values.keys():
            setattr(self, name, values[name])
        others = {name: value for name, value in values.items() if name not in FIGURE_COLUMNS}
        self.figures = self.figures | others

    @property
    def all_figures(self) -> dict[str, Any]:
        """Every figure by its name, as JSON values."""
        columns = {name: getattr(self, name) for name in FIGURE_COLUMNS}
        return complete_figures(self.figures, columns)

    @property
    def pause_text(self) -> str:
        """Why the machine takes no steps; "" while it does."""
        pause = self.figures.get("pause")
        if not pause or self.activity != Activity.PAUSED:
            return ""
        return PAUSE_TEXTS[PauseReason(pause["reason"])]

    @property
    def has_reported(self) -> bool:
        """Whether it ever reported: until then it has not trained."""
        return self.last_report > NEVER

    @property
    def is_alive(self) -> bool:
        """Whether the machine reports."""
        return is_alive(
            self.last_seen.timestamp(),
            self.activity,
            max(self.run.report_every, self.report_interval),
            timezone.now().timestamp(),
        )


# The figures that have a column.
FIGURE_COLUMNS = MachineFigures.model_fields.keys() & {
    field.name for field in Membership._meta.concrete_fields
}
_NO_FIGURES = NO_FIGURES.model_dump(mode="json")


def complete_figures(figures: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
    """Return every figure by its name; one that the machine has never reported is that of none."""
    return _NO_FIGURES | figures | columns


def is_alive(last_seen: float, activity: str, interval: float, now: float) -> bool:
    """Return whether a machine counts as alive; one that has left is gone at once.

    One that downloads the weights is no machine of the run.

    Args:
        last_seen: seconds since 1970.
        activity: what the machine last reported.
        interval: seconds from its last report to the next one.
        now: seconds since 1970.
    """
    silence = MAX_MISSED_REPORTS * interval + GRACE_SECONDS
    return activity not in NOT_AT_WORK and now - last_seen < silence
