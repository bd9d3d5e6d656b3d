"""The logs of all origins, what follows from them, and what proves that one lied."""

from django.db import models
from django.utils import timezone

from barnraise.protocol.messages import Signed
from coordinator.eventlog.event import NO_DIGEST, Event


class LogState(models.Model):
    """One row: the sum of all subjects' digests, and the highest stamp seen. Who changes what mirrors share locks it
    first (`writer.log_transaction`), so that all such changes stand in one line and none waits for another crosswise."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    total = models.CharField(max_length=64, default=NO_DIGEST)
    hlc = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return self.total


class Origin(models.Model):
    """One log: a mirror's, or one of its lives. `cut_seq` is its last accepted event where it was cut, and `why`."""

    id = models.CharField(max_length=32, primary_key=True)
    key = models.CharField(max_length=64, db_index=True)
    head_seq = models.BigIntegerField(default=0)
    head_digest = models.CharField(max_length=64, default=NO_DIGEST)
    head_hlc = models.BigIntegerField(default=0)
    ours = models.BooleanField(default=False)
    cut_seq = models.BigIntegerField(null=True)
    why = models.CharField(max_length=300, blank=True)
    known = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["known", "id"]
        constraints = [
            models.UniqueConstraint(
                fields=["ours"], condition=models.Q(ours=True), name="one_origin_of_our_own"
            )
        ]

    def __str__(self) -> str:
        return f"{self.id[:8]} of {self.key[:8]}"


class LogEvent(models.Model):
    """An event, with its exact text. `accepted`: not cut away; `understood`: of a type that a version which ran here
    knows."""

    digest = models.CharField(
        max_length=64, primary_key=True
    )  # of the text: no two events share it
    uuid = models.UUIDField()  # the event's id, as its author says
    origin = models.ForeignKey(Origin, on_delete=models.CASCADE, related_name="events")
    seq = models.BigIntegerField()
    hlc = models.BigIntegerField()
    type = models.CharField(max_length=60)
    subject = models.CharField(max_length=210)
    body = models.TextField()
    key = models.CharField(max_length=64)
    signature = models.CharField(max_length=128)
    accepted = models.BooleanField(default=True)
    understood = models.BooleanField(default=False)

    class Meta:
        ordering = ["origin", "seq"]
        constraints = [models.UniqueConstraint(fields=["origin", "seq"], name="one_event_a_number")]
        indexes = [
            models.Index(fields=["subject"], name="events_of_a_subject"),
            models.Index(
                fields=["type"],
                condition=models.Q(understood=False, accepted=True),
                name="events_not_understood",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.type} {self.subject}"

    @property
    def event(self) -> Event:
        return Event.model_validate_json(self.body)

    @property
    def signed(self) -> Signed:
        return Signed(key=self.key, body=self.body, signature=self.signature)


class Aggregate(models.Model):
    """What the accepted events say of one thing: canonical JSON, "" where there is no such thing (any more). `stale`:
    it has events that `state` was not folded from; `stored`: the rows say what `state` says, else they wait for another
    subject's."""

    name = models.CharField(max_length=210, primary_key=True)
    state = models.TextField(blank=True)
    stale = models.BooleanField(default=False)
    stored = models.BooleanField(default=True)
    lacks = models.TextField(
        blank=True, default=""
    )  # subjects that its rows could do without, and would name

    class Meta:
        indexes = [
            models.Index(
                fields=["name"], condition=models.Q(stale=True), name="subjects_to_be_folded"
            ),
            models.Index(
                fields=["name"], condition=models.Q(stored=False), name="subjects_not_yet_stored"
            ),
            models.Index(
                fields=["name"], condition=~models.Q(lacks=""), name="subjects_that_lack_another"
            ),
        ]

    def __str__(self) -> str:
        return self.name


class UniquenessClaim(models.Model):
    """A subject wants a word that only one may have, such as a run its slug. Who claimed it first has it: by (hlc, id)
    of the event that did."""

    space = models.CharField(max_length=30)  # of words, "run.slug"
    word = models.CharField(max_length=200)
    subject = models.CharField(max_length=210)
    hlc = models.BigIntegerField()
    uuid = models.UUIDField()

    class Meta:
        ordering = ["hlc", "uuid", "subject"]
        constraints = [
            models.UniqueConstraint(fields=["subject", "space"], name="one_claim_a_subject")
        ]
        indexes = [models.Index(fields=["space", "word"], name="claims_by_word")]

    def __str__(self) -> str:
        return f"{self.subject} claims {self.word}"


class PrivateData(models.Model):
    """What must be forgettable, and so is in no event: those name it by `digest`, BLAKE3 of `salt` and `body`. Without
    a body it is wanted here, and not yet come. It goes when no state names it any more."""

    digest = models.CharField(max_length=64, primary_key=True)
    subject = models.CharField(max_length=210, db_index=True)
    salt = models.CharField(max_length=32, blank=True)
    body = models.TextField(blank=True)

    class Meta:
        verbose_name_plural = "particulars"
        indexes = [
            models.Index(fields=["digest"], condition=models.Q(body=""), name="particulars_wanted")
        ]

    def __str__(self) -> str:
        return f"particulars of {self.subject}"


class ForkProof(models.Model):
    """Two events that one origin signed with one number."""

    origin = models.ForeignKey(Origin, on_delete=models.CASCADE, related_name="proofs")
    seq = models.BigIntegerField()
    first = models.JSONField()  # wire.Signed
    second = models.JSONField()
    found = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["origin", "seq"]
        constraints = [models.UniqueConstraint(fields=["origin", "seq"], name="one_proof_a_number")]

    def __str__(self) -> str:
        return f"{self.origin} signed two events {self.seq}"


class PeerClock(models.Model):
    """How far another mirror's clock was ahead of ours when it last signed its time. `steady`: this machine's seconds
    since it started, by a clock that nobody sets, and `boot`, which start that was; "" where no system says so."""

    key = models.CharField(max_length=64, primary_key=True)
    ahead = models.FloatField()  # seconds
    heard = models.DateTimeField(default=timezone.now)  # by our clock of then
    steady = models.FloatField(default=0, db_default=0)
    boot = models.CharField(max_length=36, blank=True, default="", db_default="")

    def __str__(self) -> str:
        return f"{self.key[:8]} is {self.ahead:+.1f} s from us"
