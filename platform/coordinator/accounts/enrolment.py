"""Device-code enrolment: a machine shows a code, and its owner approves the code in the browser."""

import secrets
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.conf import settings
from django.db import IntegrityError, models, transaction
from django.utils import timezone

from barnraise.protocol import coordinator_messages
from coordinator.accounts.machines import Machine, choose_free_name, strip_unprintable
from coordinator.audit.log import record
from coordinator.eventlog import writer
from coordinator.lib.exceptions import UserError

CODE_ALPHABET = "BCDFGHJKLMNPQRSTVWXZ23456789"  # no vowels, no characters that look alike
CODE_MINUTES = 15
CODE_ATTEMPTS = 5


class Enrolment(models.Model):
    """A machine's request to belong to somebody, until that person approves its code."""

    if TYPE_CHECKING:
        decided_by_id: UUID | None

    class Decision(models.TextChoices):
        """What the person decided."""

        PENDING = "pending"
        APPROVED = "approved"
        REFUSED = "refused"

    code = models.CharField(max_length=20, primary_key=True)
    key = models.CharField(max_length=64, db_index=True)
    description = models.JSONField()  # a `coordinator_messages.MachineDescription`
    decision = models.CharField(max_length=10, choices=Decision, default=Decision.PENDING)
    created = models.DateTimeField(default=timezone.now)
    expires = models.DateTimeField()
    decided_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL
    )
    machine = models.ForeignKey(Machine, null=True, blank=True, on_delete=models.CASCADE)

    class Meta:
        ordering = ["-created"]

    def __str__(self) -> str:
        return self.code

    @classmethod
    def open(cls, request: coordinator_messages.EnrolmentRequest) -> "Enrolment":
        """Create a fresh code for this key and delete its older ones that are still pending."""
        now = timezone.now()
        fields = request.machine.model_dump().items()
        description = {name: strip_unprintable(value) for name, value in fields}
        with transaction.atomic():
            cls.objects.filter(key=request.key, decision=cls.Decision.PENDING).delete()
            for _ in range(CODE_ATTEMPTS):
                text = "".join(secrets.choice(CODE_ALPHABET) for _ in range(8))
                try:
                    with transaction.atomic():
                        return cls.objects.create(
                            code=f"{text[:4]}-{text[4:]}",
                            key=request.key,
                            description=description,
                            created=now,
                            expires=now + timedelta(minutes=CODE_MINUTES),
                        )
                except IntegrityError:  # the code is in use; 28**8 of them make this rare
                    continue
        raise AssertionError(f"{CODE_ATTEMPTS} codes in a row were in use")

    @classmethod
    def find(cls, code: str) -> "Enrolment | None":
        """Find by code as a person types it: lower case and a missing hyphen are fine."""
        text = "".join(c for c in code.upper() if c in CODE_ALPHABET)
        return cls.objects.filter(code=f"{text[:4]}-{text[4:]}").first() if len(text) == 8 else None

    @property
    def status(self) -> str:
        """Return "pending", "approved", "refused" or "expired"."""
        expired = self.decision == self.Decision.PENDING and timezone.now() >= self.expires
        return "expired" if expired else str(self.decision)

    def approve(self, user: Any) -> Machine:
        """Make the machine this person's.

        Raises:
            UserError: the code was decided on or expired, the key was revoked, or the machine
                belongs to somebody else.
        """
        described = coordinator_messages.MachineDescription.model_validate(self.description)
        columns = described.model_dump()
        with writer.log_transaction():
            self._decide(self.Decision.APPROVED, user)
            names = Machine.names_in_use(user.pk, besides=self.key)
            columns["hostname"] = choose_free_name(described.hostname, names)
            machine, created = Machine.objects.select_for_update().get_or_create(
                key=self.key, defaults={"owner": user, **columns}
            )
            if machine.revoked:
                raise UserError(
                    "this machine's key was revoked; give the machine a new key and enrol it again"
                )
            if machine.owner_id != user.pk:
                raise UserError(
                    "this machine belongs to somebody else here; give it a key of its own"
                )
            if not created:
                columns.pop("hostname")  # the owner may have renamed the machine
                Machine.objects.filter(pk=machine.pk).update(**columns)
                machine.refresh_from_db()
                machine.record_description()
            Enrolment.objects.filter(pk=self.pk).update(machine=machine)
            record("machine.enrol", machine, actor=user, again=not created)
        self.refresh_from_db()
        return machine

    def refuse(self, user: Any = None) -> None:
        """Refuse the machine.

        Raises:
            UserError: the code was decided on before, or expired.
        """
        with transaction.atomic():
            self._decide(self.Decision.REFUSED, user)
            record("machine.turn_away", self, actor=user)
        self.refresh_from_db()

    def _decide(self, decision: str, user: Any) -> None:
        pending = Enrolment.objects.filter(
            pk=self.pk, decision=self.Decision.PENDING, expires__gt=timezone.now()
        )
        if pending.update(decision=decision, decided_by=user) != 1:
            self.refresh_from_db()
            raise UserError(
                f"this code is {self.status}; run `barnraise login` on the machine for a new one"
            )

    @property
    def expires_epoch(self) -> float:
        """When the code expires, in seconds since 1970."""
        return self.expires.timestamp()

    @property
    def seconds_left(self) -> float:
        """How long the code is still valid."""
        return max(0.0, self.expires_epoch - time.time())
