"""A machine's part in a run."""

from datetime import UTC, datetime, timedelta

from django.db import models
from django.db.models import Exists, ExpressionWrapper, F, OuterRef, Q
from django.utils import timezone
from uuid6 import uuid7

from barnraise.protocol.enums import Activity
from coordinator.accounts.models import Machine
from coordinator.fleet.machine_state import HardwareMeasurement as HardwareMeasurement
from coordinator.fleet.machine_state import MachinePause as MachinePause
from coordinator.fleet.verdicts import VerdictRecord as VerdictRecord
from coordinator.runs.models import Run

MAX_MISSED_REPORTS = 3  # reports a machine may miss…
GRACE_SECONDS = 5.0  # …and seconds more, before it counts as gone
NEVER = datetime(1970, 1, 1, tzinfo=UTC)


class MembershipQuerySet(models.QuerySet):
    def alive(self) -> "MembershipQuerySet":
        every = ExpressionWrapper(
            F("run__report_every") * MAX_MISSED_REPORTS * timedelta(seconds=1)
            + timedelta(seconds=GRACE_SECONDS),
            output_field=models.DurationField(),
        )
        since = ExpressionWrapper(timezone.now() - every, output_field=models.DateTimeField())
        return self.filter(last_seen__gt=since, machine__revoked=None).exclude(
            activity=Activity.LEFT
        )

    def alive_in(self, run: Run) -> "MembershipQuerySet":
        """Those of one run: as `alive`, without asking each row for its run."""
        since = timezone.now() - timedelta(
            seconds=MAX_MISSED_REPORTS * run.report_every + GRACE_SECONDS
        )
        return self.filter(run=run, last_seen__gt=since, machine__revoked=None).exclude(
            activity=Activity.LEFT
        )

    def newest(self) -> "MembershipQuerySet":
        """Of several mirrors' rows of a machine in a run the one that heard a report last; of two alike ours."""
        later = Q(heard__gt=OuterRef("heard")) | Q(
            heard=OuterRef("heard"), mirror__lt=OuterRef("mirror")
        )
        others = Membership.everywhere.filter(
            later, run=OuterRef("run"), machine=OuterRef("machine")
        )
        return self.filter(~Exists(others))


class LocalMembershipManager(models.Manager.from_queryset(MembershipQuerySet)):
    """What machines told this site themselves."""

    def get_queryset(self) -> MembershipQuerySet:
        return super().get_queryset().filter(mirror="")


class Membership(models.Model):
    """Numbers are from the machine's latest report that reached Postgres; `mark` is the highest report number up to
    which Postgres holds everything; `plan` is the last it told, a `wire.PlanView`, and `step_seconds` belongs to it;
    `exchange` the last `ExchangeView`.

    Where another mirror tells of it (`mirror`, its key) the row says what was reported *there*, and stands apart from
    ours: `objects` are ours alone, `everywhere` are all, and `newest` chooses."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="memberships")
    machine = models.ForeignKey(Machine, on_delete=models.CASCADE, related_name="memberships")
    mirror = models.CharField(max_length=64, blank=True, default="", db_default="")
    joined = models.DateTimeField(default=timezone.now)
    last_seen = models.DateTimeField(default=timezone.now)
    heard = models.DateTimeField(
        default=NEVER, db_default=NEVER
    )  # its last report; it may be seen without one
    addresses = models.JSONField(default=list)
    version = models.CharField(max_length=40, blank=True)
    activity = models.CharField(
        max_length=10, choices=[(a.value, a.value) for a in Activity], default="joining"
    )
    incarnation = models.CharField(max_length=16, blank=True)
    lives = models.JSONField(default=dict)  # incarnation → how many updates it has published
    ticket_expires = models.DateTimeField(null=True)
    step = models.BigIntegerField(default=0)
    tokens = models.BigIntegerField(default=0)
    ledger_tokens = models.BigIntegerField(default=0)
    rate = models.FloatField(default=0)
    updates_sent = models.BigIntegerField(default=0)
    updates_received = models.BigIntegerField(default=0)
    peers = models.PositiveIntegerField(default=0)
    peer_bytes_sent = models.BigIntegerField(default=0)
    peer_bytes_received = models.BigIntegerField(default=0)
    vector = models.CharField(max_length=64, blank=True)
    anchor = models.CharField(max_length=64, blank=True)
    plan = models.JSONField(null=True)
    step_seconds = models.FloatField(null=True)
    exchange = models.JSONField(null=True)
    safe = models.DateTimeField(null=True)  # when it said that it holds the final checkpoint whole
    mark = models.BigIntegerField(default=0)
    latest = models.BigIntegerField(default=0)  # the highest report number whose numbers these are
    changed = models.BigIntegerField(
        null=True, default=0, db_default=0
    )  # `telemetry.moments`; null: not ours to tell
    planned = models.BigIntegerField(
        default=0, db_default=0
    )  # when its plan was another one the last time

    objects = LocalMembershipManager()
    everywhere = MembershipQuerySet.as_manager()

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
                name="memberships_to_tell",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.machine} in {self.run}"

    @property
    def is_alive(self) -> bool:
        return is_alive(
            self.last_seen.timestamp(),
            self.activity,
            self.run.report_every,
            timezone.now().timestamp(),
        )


def is_alive(last_seen: float, activity: str, report_every: float, now: float) -> bool:
    """Times in seconds since 1970. A machine that said it left is gone at once."""
    return (
        activity != Activity.LEFT
        and now - last_seen < MAX_MISSED_REPORTS * report_every + GRACE_SECONDS
    )
