"""Rows of what machines have witnessed of other people's updates, and of what others vouch for."""

from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import models
from django.utils import timezone
from uuid6 import uuid7

from coordinator.accounts.models import Machine
from coordinator.fleet.vouching import WitnessedHead
from coordinator.runs.models import Run


class AuthorKey(NamedTuple):
    """One author: a run, a machine in it, and the machine's incarnation."""

    run: UUID
    machine: UUID
    incarnation: str


class UpdateWitness(models.Model):
    """A person's machine has applied every update of an author up to one.

    `run_tokens` is the run's count when the site received it. `header` and `statement` are the two
    signed parts of a `coordinator_messages.Attestation`. `changed` orders the rows that this site
    sends to the other mirrors (`rollup.next_change_stamp`); null on a row that came from one.
    """

    if TYPE_CHECKING:
        run_id: UUID
        machine_id: UUID
        person_id: UUID
        witness_id: UUID | None

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="witnesses")
    machine = models.ForeignKey(Machine, on_delete=models.CASCADE, related_name="+")
    incarnation = models.CharField(max_length=16)
    person = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    witness = models.ForeignKey(Machine, null=True, on_delete=models.SET_NULL, related_name="+")
    seq = models.BigIntegerField()
    total = models.BigIntegerField()
    digest = models.CharField(max_length=64)
    previous = models.CharField(max_length=64)
    run_tokens = models.BigIntegerField(default=0)
    received = models.DateTimeField(default=timezone.now)
    header: Any = models.JSONField()
    statement: Any = models.JSONField()
    changed = models.BigIntegerField(null=True, default=0, db_default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run", "machine", "incarnation", "person"], name="one_witness_a_person"
            )
        ]
        indexes = [
            models.Index(
                fields=["changed", "id"],
                condition=models.Q(changed__isnull=False),
                name="witnesses_to_publish",
            )
        ]

    def __str__(self) -> str:
        return f"{self.machine_id} up to {self.seq}"

    @property
    def author(self) -> AuthorKey:
        """The author."""
        return AuthorKey(self.run_id, self.machine_id, self.incarnation)

    @property
    def rank(self) -> tuple[int, str]:
        """The order of one person's rows of an author: the last counts."""
        return self.seq, self.digest

    def to_head(self) -> WitnessedHead:
        """Return it without what it was signed with."""
        return WitnessedHead(self.person_id, self.seq, self.total, self.digest, self.previous)


class VouchedAuthor(models.Model):
    """Up to which update others vouch for an author, and for how many tokens.

    `speed` is tokens/s between the last two such updates, `since` when the site learnt of the last.
    """

    if TYPE_CHECKING:
        run_id: UUID
        machine_id: UUID

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="vouched_authors")
    machine = models.ForeignKey(Machine, on_delete=models.CASCADE, related_name="+")
    incarnation = models.CharField(max_length=16)
    seq = models.BigIntegerField()
    total = models.BigIntegerField()
    speed = models.FloatField(default=0)
    since = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run", "machine", "incarnation"], name="one_vouched_author"
            )
        ]

    def __str__(self) -> str:
        return f"{self.machine_id} up to {self.seq}"
