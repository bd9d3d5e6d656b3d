"""Credit rows: ranges of a machine's updates that machines of other people have confirmed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

from django.db import connection, models
from uuid6 import uuid7

from coordinator.accounts.models import Machine
from coordinator.runs.models import Run

# The columns of a range and of who confirmed it.
RANGE_COLUMNS = (
    *("id", "run_id", "machine_id", "incarnation", "day"),
    *("first", "last", "tokens", "witness_id"),
)


class AuthoredManager(models.Manager["Credit"]):
    """Rows that name updates: those of their authors."""

    def get_queryset(self) -> models.QuerySet["Credit"]:
        """Leave out what moves tokens within a crew."""
        return super().get_queryset().filter(lead=None)


class Credit(models.Model):
    """Credit for the updates `first` to `last` of one incarnation, confirmed on one day.

    `published_last` and `published_tokens` say up to which update, and for how many of these
    tokens, mirrors have exchanged receipts. `author_header` and `witness_signature` are the two
    signed parts of a `coordinator_messages.Attestation` for the last update, so that anybody can
    check the claim.

    A row with a `lead` moves a day's tokens within the crew of that author, and names no updates:
    each member's machine has one, and the lead's has one with their negative sum. So all rows of a
    machine sum to its credit. `authored` are the other rows.
    """

    if TYPE_CHECKING:
        run_id: UUID
        machine_id: UUID
        lead_id: UUID | None
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
    # The machine whose `incarnation` published what its crew trained.
    lead = models.ForeignKey(Machine, null=True, on_delete=models.CASCADE, related_name="+")

    objects: ClassVar[models.Manager["Credit"]] = models.Manager()
    authored: ClassVar[models.Manager["Credit"]] = AuthoredManager()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run", "machine", "incarnation", "day"],
                condition=models.Q(lead=None),
                name="one_range_a_day",
            ),
            models.UniqueConstraint(
                fields=["run", "lead", "machine", "incarnation", "day"], name="one_share_a_day"
            ),
        ]
        indexes = [
            models.Index(fields=["machine", "day"], name="credit_of_a_machine"),
            models.Index(fields=["day"], name="credit_by_day"),
        ]

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens of {self.machine}"

    @classmethod
    def upsert(cls, rows: "Sequence[Credit]", columns: Sequence[str], assignments: str) -> None:
        """Write rows in one statement: what concurrent reports add must not be lost.

        Args:
            rows: at most one for each author and day.
            columns: what to write in addition to `RANGE_COLUMNS`.
            assignments: what to change where an author has a row of that day, in SQL; the row is
                called "old" there.
        """
        if not rows:
            return
        names = (*RANGE_COLUMNS, *columns)
        fields = [cls._meta.get_field(name.removesuffix("_id")) for name in names]
        marks = ", ".join([f"({', '.join(['%s'] * len(names))})"] * len(rows))
        with connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {cls._meta.db_table} AS old ({', '.join(names)}) VALUES {marks} "
                "ON CONFLICT (run_id, machine_id, incarnation, day) WHERE lead_id IS NULL "
                f"DO UPDATE SET {assignments}",
                [
                    field.get_db_prep_save(getattr(row, field.attname), connection)
                    for row in rows
                    for field in fields
                ],
            )
