"""What reports become in Postgres: sums over ten seconds, and every measured loss."""

from django.db import models
from django.utils import timezone

from coordinator.fleet.models import Membership
from coordinator.telemetry.checkpoints import Checkpoint as Checkpoint
from coordinator.telemetry.checkpoints import CheckpointHolder as CheckpointHolder
from coordinator.telemetry.events import RunEvent as RunEvent
from coordinator.telemetry.remote.cursor import RemoteCursor as RemoteCursor

BUCKET_SECONDS = 10  # seconds the finest Rollup covers
BUCKET_WIDTHS = (BUCKET_SECONDS, 60, 3600)  # …and each of the kinds there are
OURS = models.Q(changed__isnull=False)


class Rollup(models.Model):
    """One machine's reports of `width` seconds, by the time they were measured: each report is in a row of every width.
    `rate_sum` / `reports` is the mean rate; the others are how much the totals grew."""

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
    changed = models.BigIntegerField(
        null=True, default=0, db_default=0
    )  # see `moments`; null: another mirror's

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["membership", "width", "bucket"], name="one_rollup_a_bucket"
            )
        ]
        indexes = [
            models.Index(fields=["width", "bucket"], name="rollups_by_age"),
            models.Index(fields=["changed", "id"], condition=OURS, name="rollups_to_tell"),
        ]

    def __str__(self) -> str:
        return f"{self.membership_id}, {self.width} s at {self.bucket}"


class LossPoint(models.Model):
    """One measured loss, in nats a token; `tokens` is the ledger's count then."""

    membership = models.ForeignKey(Membership, on_delete=models.CASCADE, related_name="points")
    seq = models.BigIntegerField()  # of the report it came in…
    position = models.PositiveSmallIntegerField()  # …and where in it
    kind = models.CharField(max_length=10)  # "train" or "validation"
    tokens = models.BigIntegerField()
    loss = models.FloatField()
    at = models.FloatField()  # seconds since 1970
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
            models.Index(fields=["changed", "id"], condition=OURS, name="points_to_tell"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.loss:.4f} at {self.tokens:,}"


class ReportReceipt(models.Model):
    """A report that is in although one before it is missing: it lies above the mark, and must not count twice."""

    membership = models.ForeignKey(Membership, on_delete=models.CASCADE, related_name="receipts")
    seq = models.BigIntegerField()
    received = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["membership", "seq"], name="one_receipt_a_report")
        ]

    def __str__(self) -> str:
        return f"{self.membership_id} report {self.seq}"
