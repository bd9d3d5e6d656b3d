"""Store the logs of all origins, the state that follows from them, and evidence of forks."""

from typing import TYPE_CHECKING

from django.db import models
from django.utils import timezone

from barnraise.protocol.messages import Signed
from coordinator.eventlog.event import NO_DIGEST, Event


class LogState(models.Model):
    """Hold one row: the sum of all aggregates' digests and the highest timestamp seen.

    Every change of replicated data locks this row first (`writer.log_transaction`), so such
    changes are serialised and cannot deadlock on each other's rows.
    """

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    state_sum = models.CharField(max_length=64, default=NO_DIGEST)
    hlc = models.BigIntegerField(default=0)
    # Set by `manage.py restore`: the site is read-only until another mirror has returned the end of
    # its own log. `writer.resume` clears it.
    restore_pending = models.BooleanField(default=False)
    # BLAKE3 of Django's SECRET_KEY; every host of this site must have the same.
    secret_fingerprint = models.CharField(max_length=64, blank=True)

    def __str__(self) -> str:
        return self.state_sum


class Origin(models.Model):
    """Describe one log: a mirror's, or one of several that it wrote after each other."""

    if TYPE_CHECKING:
        events: "models.Manager[LogEvent]"
        proofs: "models.Manager[ForkProof]"

    id = models.CharField(max_length=32, primary_key=True)
    key = models.CharField(max_length=64, db_index=True)
    head_seq = models.BigIntegerField(default=0)
    head_digest = models.CharField(max_length=64, default=NO_DIGEST)
    head_hlc = models.BigIntegerField(default=0)
    ours = models.BooleanField(default=False)  # this site appends to it
    last_valid_seq = models.BigIntegerField(null=True)  # None if it is not truncated
    truncation_reason = models.CharField(max_length=300, blank=True)
    first_seen = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["first_seen", "id"]
        constraints = [
            models.UniqueConstraint(
                fields=["ours"], condition=models.Q(ours=True), name="one_origin_of_our_own"
            )
        ]

    def __str__(self) -> str:
        return f"{self.id[:8]} of {self.key[:8]}"


class LogEvent(models.Model):
    """Store an event with its exact signed text."""

    # BLAKE3 of the text; no two events share it.
    digest = models.CharField(max_length=64, primary_key=True)
    uuid = models.UUIDField()  # as its author chose it
    origin = models.ForeignKey(Origin, on_delete=models.CASCADE, related_name="events")
    seq = models.BigIntegerField()
    hlc = models.BigIntegerField()
    type = models.CharField(max_length=60)
    aggregate = models.CharField(max_length=210)
    body = models.TextField()
    key = models.CharField(max_length=64)
    signature = models.CharField(max_length=128)
    accepted = models.BooleanField(default=True)  # until truncation withdraws it
    understood = models.BooleanField(default=False)  # by a version that ran here

    class Meta:
        ordering = ["origin", "seq"]
        constraints = [models.UniqueConstraint(fields=["origin", "seq"], name="one_event_a_number")]
        indexes = [
            models.Index(fields=["aggregate"], name="events_of_an_aggregate"),
            models.Index(
                fields=["type"],
                condition=models.Q(understood=False, accepted=True),
                name="events_not_understood",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.type} {self.aggregate}"

    @property
    def event(self) -> Event:
        """Return the event inside the text."""
        return Event.model_validate_json(self.body)

    @property
    def signed(self) -> Signed:
        """Return the event as its author signed it."""
        return Signed(key=self.key, body=self.body, signature=self.signature)


class Aggregate(models.Model):
    """Store what the accepted events say about one thing."""

    name = models.CharField(max_length=210, primary_key=True)  # "aggregate_type:name"
    state = models.TextField(blank=True)  # canonical JSON; "" if the thing does not exist
    stale = models.BooleanField(default=False)  # `state` lacks events that arrived later
    projected = models.BooleanField(default=True)  # False: its rows wait for another's
    # Names, separated by spaces, of aggregates that its rows would refer to and omit for now.
    missing_references = models.TextField(blank=True, default="")

    class Meta:
        indexes = [
            models.Index(
                fields=["name"], condition=models.Q(stale=True), name="aggregates_to_be_folded"
            ),
            models.Index(
                fields=["name"],
                condition=models.Q(projected=False),
                name="aggregates_not_projected",
            ),
            models.Index(
                fields=["name"],
                condition=~models.Q(missing_references=""),
                name="aggregates_lacking_another",
            ),
        ]

    def __str__(self) -> str:
        return self.name


class UniquenessClaim(models.Model):
    """Record that an aggregate wants a value that only one may have, such as a run its slug.

    The earliest claim wins, ordered by (hlc, uuid) of the event that made it.
    """

    namespace = models.CharField(max_length=30)  # such as "run.slug"
    value = models.CharField(max_length=200)
    aggregate = models.CharField(max_length=210)
    hlc = models.BigIntegerField()
    uuid = models.UUIDField()

    class Meta:
        ordering = ["hlc", "uuid", "aggregate"]
        constraints = [
            models.UniqueConstraint(
                fields=["aggregate", "namespace"], name="one_claim_an_aggregate"
            )
        ]
        indexes = [models.Index(fields=["namespace", "value"], name="claims_by_value")]

    def __str__(self) -> str:
        return f"{self.aggregate} claims {self.value}"


class PrivateData(models.Model):
    """Store what must be erasable and is therefore in no event.

    Events name it by `digest`, the BLAKE3 of `salt` and `body`. A row without a body is wanted and
    has not arrived. The row is deleted as soon as no state names it.
    """

    digest = models.CharField(max_length=64, primary_key=True)
    aggregate = models.CharField(max_length=210, db_index=True)
    salt = models.CharField(max_length=32, blank=True)
    body = models.TextField(blank=True)

    class Meta:
        verbose_name_plural = "private data"
        indexes = [
            models.Index(
                fields=["digest"], condition=models.Q(body=""), name="private_data_missing"
            )
        ]

    def __str__(self) -> str:
        return f"private data of {self.aggregate}"


class ForkProof(models.Model):
    """Store two events that one origin signed with one number, each as `messages.Signed`."""

    origin = models.ForeignKey(Origin, on_delete=models.CASCADE, related_name="proofs")
    seq = models.BigIntegerField()
    first = models.JSONField()
    second = models.JSONField()
    found = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["origin", "seq"]
        constraints = [models.UniqueConstraint(fields=["origin", "seq"], name="one_proof_a_number")]

    def __str__(self) -> str:
        return f"{self.origin} signed two events {self.seq}"


class PeerClock(models.Model):
    """Record how far another mirror's clock was ahead of ours when it last signed its time."""

    key = models.CharField(max_length=64, primary_key=True)
    offset_seconds = models.FloatField()
    # By this machine's wall clock of that moment.
    measured_at = models.DateTimeField(default=timezone.now)
    # Seconds since this machine booted; nobody sets this.
    uptime = models.FloatField(default=0, db_default=0)
    # "" if unknown.
    boot_id = models.CharField(max_length=36, blank=True, default="", db_default="")

    def __str__(self) -> str:
        return f"{self.key[:8]} is {self.offset_seconds:+.1f} s from us"
