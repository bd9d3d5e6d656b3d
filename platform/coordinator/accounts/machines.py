"""People's machines, and how they become theirs."""

import secrets
import time
from datetime import timedelta

from django.conf import settings
from django.db import IntegrityError, models, transaction
from django.utils import timezone
from uuid6 import uuid7

from barnraise.protocol import coordinator_messages
from coordinator.audit.log import record
from coordinator.eventlog import private_data
from coordinator.eventlog import writer as mirrors
from coordinator.lib.exceptions import UserError

CODE_ALPHABET = "BCDFGHJKLMNPQRSTVWXZ23456789"  # no vowels, nothing that looks like something else
CODE_MINUTES = 15
NOTHING = {
    "hostname": "",
    "system": "",
    "processor": "",
    "cores": 0,
    "memory_bytes": 0,
    "accelerator": "",
}  # known


def printable(value):
    """What people and machines say of themselves is shown to others: nothing in it may hide, or turn text around."""
    return "".join(c for c in value if c.isprintable()) if isinstance(value, str) else value


def machine_name(hostname: str, key: str) -> str:
    return hostname or f"machine {key[:8]}"


class Machine(models.Model):
    """One of a person's PCs, known by its Ed25519 key."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    key = models.CharField(max_length=64, unique=True, editable=False)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="machines"
    )
    hostname = models.CharField(max_length=100, blank=True)
    system = models.CharField(max_length=100, blank=True)
    processor = models.CharField(max_length=100, blank=True)
    cores = models.PositiveIntegerField(default=0)
    memory_bytes = models.BigIntegerField(default=0)
    accelerator = models.CharField(max_length=100, blank=True)
    enrolled = models.DateTimeField(default=timezone.now)
    last_seen = models.DateTimeField(null=True, blank=True)
    revoked = models.DateTimeField(null=True, blank=True)
    revoked_reason = models.CharField(max_length=300, blank=True)

    class Meta:
        ordering = ["-enrolled"]
        # Few are, and every directive names those of its run.
        indexes = [
            models.Index(
                fields=["revoked"],
                condition=models.Q(revoked__isnull=False),
                name="machine_revoked",
            )
        ]

    def __str__(self) -> str:
        return self.name

    def save(self, *args, **kwargs) -> None:
        """However a machine becomes somebody's, other mirrors hear of it."""
        if not self._state.adding:
            return super().save(*args, **kwargs)
        with mirrors.log_transaction():
            super().save(*args, **kwargs)
            mirrors.record("machine.enrol", self.key, self.told)

    @property
    def told(self) -> dict:
        """To other mirrors; within `writer.log_transaction`."""
        about = private_data.store(
            f"machine:{self.key}", {field: getattr(self, field) for field in NOTHING}
        )
        return {"about": about, "id": self.pk, "owner": self.owner_id, "enrolled": self.enrolled}

    @property
    def name(self) -> str:
        return machine_name(self.hostname, self.key)

    def rename(self, name: str, *, actor=None) -> None:
        """What people see it called. "" goes back to its key. It keeps this name when it enrols again."""
        name = " ".join(printable(name).split())[:100]
        with mirrors.log_transaction():
            Machine.objects.filter(pk=self.pk).update(hostname=name)
            self.refresh_from_db()
            mirrors.record("machine.about", self.key, {"about": self.told["about"]})
            record("machine.rename", self, actor=actor, name=name)

    def revoke(self, *, actor=None, reason: str = "") -> bool:
        """From now on the site refuses it, and its peers hear of that. False when it was revoked before."""
        with mirrors.log_transaction():
            still, now = Machine.objects.filter(pk=self.pk, revoked=None), timezone.now()
            changed = still.update(revoked=now, revoked_reason=reason[:300]) == 1
            if changed:
                mirrors.record("machine.revoke", self.key, {"at": now})
                record("machine.revoke", self, actor=actor, reason=reason)
        self.refresh_from_db(fields=["revoked", "revoked_reason"])
        return changed


class Enrolment(models.Model):
    """A machine's wish to belong to somebody, waiting for that person to approve its code in the browser."""

    class Decision(models.TextChoices):
        PENDING = "pending"
        APPROVED = "approved"
        REFUSED = "refused"

    code = models.CharField(max_length=20, primary_key=True)
    key = models.CharField(max_length=64, db_index=True)
    about = models.JSONField()  # wire.Machine
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
        """A fresh code for this key; an older one that nobody decided on is void."""
        now = timezone.now()
        with transaction.atomic():
            cls.objects.filter(key=request.key, decision=cls.Decision.PENDING).delete()
            for _ in range(5):
                text = "".join(secrets.choice(CODE_ALPHABET) for _ in range(8))
                try:
                    with transaction.atomic():
                        return cls.objects.create(
                            code=f"{text[:4]}-{text[4:]}",
                            key=request.key,
                            about={
                                name: printable(value)
                                for name, value in request.machine.model_dump().items()
                            },
                            created=now,
                            expires=now + timedelta(minutes=CODE_MINUTES),
                        )
                except IntegrityError:  # the code is taken; 28**8 of them make this rare
                    continue
        raise AssertionError("five codes in a row were taken")

    @classmethod
    def find(cls, code: str) -> "Enrolment | None":
        """By code as a person types it: small letters, no hyphen."""
        text = "".join(c for c in code.upper() if c in CODE_ALPHABET)
        return cls.objects.filter(code=f"{text[:4]}-{text[4:]}").first() if len(text) == 8 else None

    @property
    def status(self) -> str:
        """ "pending", "approved", "refused" or "expired"."""
        expired = self.decision == self.Decision.PENDING and timezone.now() >= self.expires
        return "expired" if expired else str(self.decision)

    def approve(self, user) -> Machine:
        """The machine is this person's from now on. Raises UserError."""
        about = coordinator_messages.MachineDescription.model_validate(self.about).model_dump()
        with mirrors.log_transaction():
            self._decide(self.Decision.APPROVED, user)
            machine, created = Machine.objects.select_for_update().get_or_create(
                key=self.key, defaults={"owner": user, **about}
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
                about.pop("hostname")  # its owner may have renamed it
                Machine.objects.filter(pk=machine.pk).update(**about)
                machine.refresh_from_db()
                mirrors.record("machine.about", machine.key, {"about": machine.told["about"]})
            Enrolment.objects.filter(pk=self.pk).update(machine=machine)
            record("machine.enrol", machine, actor=user, again=not created)
        self.refresh_from_db()
        return machine

    def refuse(self, user=None) -> None:
        """Raises UserError when it was decided before."""
        with transaction.atomic():
            self._decide(self.Decision.REFUSED, user)
            record("machine.turn_away", self, actor=user)
        self.refresh_from_db()

    def _decide(self, decision: str, user) -> None:
        open_still = Enrolment.objects.filter(
            pk=self.pk, decision=self.Decision.PENDING, expires__gt=timezone.now()
        )
        if open_still.update(decision=decision, decided_by=user) != 1:
            self.refresh_from_db()
            raise UserError(
                f"this code is {self.status}; run `barnraise login` on the machine for a new one"
            )

    @property
    def expires_epoch(self) -> float:
        return self.expires.timestamp()

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.expires_epoch - time.time())
