"""Who may join a run that is not open to everybody: those who followed an invitation of its owner's."""

from datetime import timedelta

from django.conf import settings
from django.core.signing import BadSignature, Signer
from django.db import models, transaction
from django.utils import timezone
from uuid6 import uuid7

from coordinator.audit.log import record

DAYS = 30  # that an invitation is good for
GUESTS = 1000  # people whom one may bring


class Invitation(models.Model):
    """A link that lets whoever is signed in and follows it join a run with their machines. Its token is the id, signed:
    the link can be shown again, and a copy of the database without the site's secret makes none."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="invitations")
    note = models.CharField(max_length=80, blank=True)  # whom it is for, in the owner's words
    created = models.DateTimeField(default=timezone.now)
    expires = models.DateTimeField()
    withdrawn = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-created"]

    def __str__(self) -> str:
        return f"an invitation to {self.run}"

    @classmethod
    def make(cls, run, note: str = "", *, actor=None) -> "Invitation":
        note = "".join(c for c in note if c.isprintable())[:80]
        with transaction.atomic():
            made = cls.objects.create(
                run=run, note=note, expires=timezone.now() + timedelta(days=DAYS)
            )
            record("run.invite", run, actor=actor, invitation=made.pk)
        return made

    @classmethod
    def behind(cls, token: str) -> "Invitation | None":
        """The invitation of a link that is still good."""
        try:
            pk = _signer().unsign(token)
        except BadSignature:
            return None
        return (
            cls.objects.select_related("run")
            .filter(pk=pk, withdrawn=None, expires__gt=timezone.now())
            .first()
        )

    @property
    def token(self) -> str:
        return _signer().sign(self.pk.hex)

    @property
    def is_good(self) -> bool:
        return self.withdrawn is None and self.expires > timezone.now()

    def accept(self, user) -> bool:
        """False when this one has brought as many people as it may."""
        with transaction.atomic():
            Invitation.objects.select_for_update().get(pk=self.pk)
            if Guest.objects.filter(run=self.run_id, user=user).exists():
                return True
            if self.guests.count() >= GUESTS:
                return False
            guest = Guest.objects.create(run=self.run, user=user, invitation=self)
            record(
                "run.accept_invitation", self.run, actor=user, invitation=self.pk, guest=guest.pk
            )
        return True

    def withdraw(self, *, actor=None) -> bool:
        """The link leads nowhere from now on; who came by it stays. False when it was withdrawn before."""
        with transaction.atomic():
            changed = (
                Invitation.objects.filter(pk=self.pk, withdrawn=None).update(
                    withdrawn=timezone.now()
                )
                == 1
            )
            if changed:
                record("run.withdraw_invitation", self.run, actor=actor, invitation=self.pk)
        return changed


class Guest(models.Model):
    """A person whom an invitation brought: their machines may join."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="guests")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    invitation = models.ForeignKey(
        Invitation, null=True, on_delete=models.SET_NULL, related_name="guests"
    )
    since = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "user"], name="one_guest_a_run")]

    def __str__(self) -> str:
        return f"{self.user}, invited to {self.run}"


def _signer() -> Signer:
    return Signer(salt="barnraise.invitation")
