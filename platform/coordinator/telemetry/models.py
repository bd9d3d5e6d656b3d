"""What reports become in Postgres: sums over intervals, and every measured loss."""

from datetime import datetime, timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from django.db import models
from django.utils import timezone

from coordinator.fleet.models import Membership
from coordinator.telemetry.checkpoints import Checkpoint as Checkpoint
from coordinator.telemetry.checkpoints import CheckpointHolder as CheckpointHolder
from coordinator.telemetry.events import RunEvent as RunEvent
from coordinator.telemetry.machine_history import MachineCondition as MachineCondition
from coordinator.telemetry.machine_history import SystemReading as SystemReading
from coordinator.telemetry.remote.protocol import TelemetryPosition
from coordinator.telemetry.samples import WrittenSample as WrittenSample
from coordinator.telemetry.task_scores import RecordedScore as RecordedScore

# After failures another mirror is left alone for so many seconds.
MIN_BACKOFF_SECONDS = 4
MAX_BACKOFF_SECONDS = 120
BUCKET_SECONDS = 10  # the finest rollup
BUCKET_WIDTHS = (BUCKET_SECONDS, 60, 3600)  # seconds
OURS = models.Q(changed__isnull=False)


class Rollup(models.Model):
    """One machine's reports of an interval, by the time they were measured.

    Each report is in one row of every width. `rate_sum` / `reports` is the mean rate; the other
    figures are the growth of totals.
    """

    if TYPE_CHECKING:
        membership_id: UUID

    membership = models.ForeignKey(Membership, on_delete=models.CASCADE, related_name="rollups")
    width = models.PositiveSmallIntegerField(default=BUCKET_SECONDS)
    bucket = models.BigIntegerField()  # seconds since 1970, a multiple of the width
    reports = models.PositiveIntegerField(default=0)
    rate_sum = models.FloatField(default=0)
    tokens = models.BigIntegerField(default=0)
    updates_sent = models.BigIntegerField(default=0)
    updates_received = models.BigIntegerField(default=0)
    peer_bytes_sent = models.BigIntegerField(default=0)
    peer_bytes_received = models.BigIntegerField(default=0)
    # The sum over reports of the updates that the machine's peers had and it lacked.
    lag_sum = models.BigIntegerField(default=0, db_default=0)
    # See `rollup.next_change_stamp`; null on another mirror's row.
    changed = models.BigIntegerField(null=True, default=0, db_default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["membership", "width", "bucket"], name="one_rollup_a_bucket"
            )
        ]
        indexes = [
            models.Index(fields=["width", "bucket"], name="rollups_by_age"),
            models.Index(fields=["changed", "id"], condition=OURS, name="rollups_to_publish"),
        ]

    def __str__(self) -> str:
        return f"{self.membership_id}, {self.width} s at {self.bucket}"


class LossPoint(models.Model):
    """One measured loss in nats per token; `tokens` are those of `reports.MeasuredLoss`."""

    membership = models.ForeignKey(Membership, on_delete=models.CASCADE, related_name="points")
    seq = models.BigIntegerField()  # the number of its report
    position = models.PositiveSmallIntegerField()  # within the report
    kind = models.CharField(max_length=10)  # "train" or "validation"
    tokens = models.BigIntegerField()
    loss = models.FloatField()
    at = models.FloatField()  # seconds since 1970
    # Of the report's last training loss only.
    learning_rate = models.FloatField(null=True)
    gradient_norm = models.FloatField(null=True)
    changed = models.BigIntegerField(null=True, default=0, db_default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["membership", "seq", "position"], name="one_point_a_place"
            )
        ]
        indexes = [
            models.Index(fields=["membership", "kind", "tokens"]),
            models.Index(fields=["at"], name="points_by_age"),
            models.Index(fields=["changed", "id"], condition=OURS, name="points_to_publish"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.loss:.4f} at {self.tokens:,}"


class ReportReceipt(models.Model):
    """A stored report that lies above the mark, because an earlier one is missing.

    It keeps the report from being counted twice.
    """

    if TYPE_CHECKING:
        membership_id: UUID

    membership = models.ForeignKey(Membership, on_delete=models.CASCADE, related_name="receipts")
    seq = models.BigIntegerField()
    received = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["membership", "seq"], name="one_receipt_a_report")
        ]

    def __str__(self) -> str:
        return f"{self.membership_id} report {self.seq}"


class RemoteCursor(models.Model):
    """How far this site has pulled another mirror's figures.

    `after` is a `TelemetryPosition`. `waits`: since when that mirror names a run or machine of
    which no event has arrived here. `why`: what was wrong with the last attempt; "" for nothing.
    """

    key = models.CharField(max_length=64, primary_key=True)
    after = models.JSONField(default=dict)
    tried = models.DateTimeField(default=timezone.now)
    last_success = models.DateTimeField(null=True)
    failures = models.PositiveSmallIntegerField(default=0)  # in a row
    waits = models.DateTimeField(null=True)
    why = models.CharField(max_length=300, blank=True)

    def __str__(self) -> str:
        return self.key[:8]

    @property
    def position(self) -> TelemetryPosition:
        """The position of the last row received."""
        return TelemetryPosition.model_validate(self.after)

    def is_backing_off(self, now: datetime) -> bool:
        """Return whether the mirror is left alone for now, after failures.

        An attempt in the future was made by a clock that has been corrected since.
        """
        seconds = 0
        if self.failures:
            seconds = min(MAX_BACKOFF_SECONDS, MIN_BACKOFF_SECONDS * 2 ** min(self.failures, 16))
        return self.tried <= now < self.tried + timedelta(seconds=seconds)
