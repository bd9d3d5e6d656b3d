"""Credit rows: ranges of a machine's updates that machines of other people have confirmed."""

from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import models
from uuid6 import uuid7

from coordinator.accounts.models import Machine
from coordinator.runs.models import Run


class Credit(models.Model):
    """Credit for the updates `first` to `last` of one incarnation, confirmed on one day.

    `published_last` and `published_tokens` say up to which update, and for how many of these
    tokens, mirrors have exchanged receipts. `author_header` and `witness_signature` are the two
    signed parts of a `coordinator_messages.Attestation` for the last update, so that anybody can
    check the claim.
    """

    if TYPE_CHECKING:
        run_id: UUID
        machine_id: UUID
        witness_id: UUID | None

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="credits")
    machine = models.ForeignKey(Machine, on_delete=models.CASCADE, related_name="credits")
    incarnation = models.CharField(max_length=16)
    day = models.DateField()
    first = models.BigIntegerField()
    last = models.BigIntegerField()
    tokens = models.BigIntegerField()
    published_last = models.BigIntegerField(default=0, db_default=0)
    published_tokens = models.BigIntegerField(default=0, db_default=0)
    # The machine that confirmed the last update of the range.
    witness = models.ForeignKey(Machine, null=True, on_delete=models.SET_NULL, related_name="+")
    author_header: Any = models.JSONField(null=True)
    witness_signature: Any = models.JSONField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run", "machine", "incarnation", "day"], name="one_range_a_day"
            )
        ]
        indexes = [
            models.Index(fields=["machine", "day"], name="credit_of_a_machine"),
            models.Index(fields=["day"], name="credit_by_day"),
        ]

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens of {self.machine}"
