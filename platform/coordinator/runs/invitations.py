"""Invitation links to a run, for people whom its owner lets join."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.conf import settings
from django.core.signing import BadSignature, Signer
from django.db import models, transaction
from django.utils import timezone
from uuid6 import uuid7

from coordinator.audit.log import record

VALID_DAYS = 30
MAX_GUESTS = 1000  # people who may join by one invitation


class RunInvitation(models.Model):
    """A link that lets signed-in people join a run with their machines.

    Its token is the id, signed: the site can show the link again, and a copy of the database alone,
    without the site's secret, contains no usable link.
    """

    if TYPE_CHECKING:
        run_id: UUID
        guests: Any

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="invitations")
    note = models.CharField(max_length=80, blank=True)  # the owner's note on whom the link is for
    created = models.DateTimeField(default=timezone.now)
    expires = models.DateTimeField()
    withdrawn = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-created"]

    def __str__(self) -> str:
        return f"an invitation to {self.run}"

    @classmethod
    def create(cls, run: Any, note: str = "", *, actor: Any = None) -> "RunInvitation":
        """Create an invitation that is valid for `VALID_DAYS`."""
        note = "".join(c for c in note if c.isprintable())[:80]
        expires = timezone.now() + timedelta(days=VALID_DAYS)
        with transaction.atomic():
            invitation = cls.objects.create(run=run, note=note, expires=expires)
            record("run.invite", run, actor=actor, invitation=invitation.pk)
        return invitation

    @classmethod
    def find_by_token(cls, token: str) -> "RunInvitation | None":
        """Find the invitation of a link; None if it is not valid, or not any longer."""
        try:
            pk = _create_signer().unsign(token)
        except BadSignature:
            return None
        valid = cls.objects.filter(pk=pk, withdrawn=None, expires__gt=timezone.now())
        return valid.select_related("run").first()

    @property
    def token(self) -> str:
        """The secret part of the link."""
        return _create_signer().sign(self.pk.hex)

    @property
    def is_valid(self) -> bool:
        """Whether the link is neither withdrawn nor expired."""
        return self.withdrawn is None and self.expires > timezone.now()

    def accept(self, user: Any) -> bool:
        """Make this person a guest of the run; False if `MAX_GUESTS` have accepted already."""
        with transaction.atomic():
            RunInvitation.objects.select_for_update().get(pk=self.pk)
            if Guest.objects.filter(run=self.run_id, user=user).exists():
                return True
            if self.guests.count() >= MAX_GUESTS:
                return False
            guest = Guest.objects.create(run=self.run, user=user, invitation=self)
            record(
                "run.accept_invitation", self.run, actor=user, invitation=self.pk, guest=guest.pk
            )
        return True

    def withdraw(self, *, actor: Any = None) -> bool:
        """Invalidate the link; guests who came by it stay.

        Returns:
            False if it was withdrawn before.
        """
        with transaction.atomic():
            valid = RunInvitation.objects.filter(pk=self.pk, withdrawn=None)
            changed = valid.update(withdrawn=timezone.now()) == 1
            if changed:
                record("run.withdraw_invitation", self.run, actor=actor, invitation=self.pk)
        return changed


class Guest(models.Model):
    """A person who accepted an invitation: their machines may join."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="guests")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    invitation = models.ForeignKey(
        RunInvitation, null=True, on_delete=models.SET_NULL, related_name="guests"
    )
    since = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "user"], name="one_guest_a_run")]

    def __str__(self) -> str:
        return f"{self.user}, invited to {self.run}"


def _create_signer() -> Signer:
    return Signer(salt="barnraise.invitation")
