"""Personal tokens: what a person's scripts show instead of a password."""

import hashlib
import secrets
from datetime import timedelta

from django.conf import settings
from django.db import models, transaction
from django.utils import timezone
from uuid6 import uuid7

from coordinator.audit.log import record

BEGINS = (
    "brn_"  # so that people, and programs that look for leaked secrets, know one when they see it
)
SCOPES = {
    "runs:read": "See the runs you may see, their machines and checkpoints",
    "runs:write": "Create, launch, pause, resume, cancel, copy and archive runs, take updates out, and invite people",
    "machines:read": "See your machines",
    "machines:write": "Rename, pause, resume and revoke your machines",
}
LONGEST_DAYS = 366
SEEN_EVERY = 60.0  # seconds between two writes of when one was last used


class Token(models.Model):
    """Its text is shown once and never kept: `digest` is the SHA-256 of it, enough for a secret of 256 bits."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="tokens"
    )
    name = models.CharField(max_length=60)
    digest = models.CharField(max_length=64, unique=True)
    begins = models.CharField(max_length=12)  # of the text, to tell tokens apart
    scopes = models.JSONField(default=list)
    created = models.DateTimeField(default=timezone.now)
    expires = models.DateTimeField()
    last_used = models.DateTimeField(null=True)
    revoked = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-created"]

    def __str__(self) -> str:
        return self.name

    @classmethod
    def make(cls, user, name: str, scopes: list[str], days: int) -> tuple["Token", str]:
        """The token, and its text to show once. Arguments are the caller's to check."""
        assert set(scopes) <= set(SCOPES) and 1 <= days <= LONGEST_DAYS
        text = BEGINS + secrets.token_urlsafe(32)
        with transaction.atomic():
            made = cls.objects.create(
                user=user,
                name=name,
                digest=_digest(text),
                begins=text[:12],
                scopes=[scope for scope in SCOPES if scope in scopes],
                expires=timezone.now() + timedelta(days=days),
            )
            record("token.make", made, actor=user, scopes=made.scopes, expires=made.expires)
        return made, text

    @classmethod
    def behind(cls, text: str) -> "Token | None":
        """The token of this text, whether it is still good or not."""
        return cls.objects.select_related("user").filter(digest=_digest(text)).first()

    @property
    def is_good(self) -> bool:
        return self.revoked is None and self.expires > timezone.now() and self.user.is_active

    def used(self) -> None:
        now = timezone.now()
        if self.last_used is None or (now - self.last_used).total_seconds() > SEEN_EVERY:
            Token.objects.filter(pk=self.pk).update(last_used=now)

    def revoke(self, *, actor=None) -> bool:
        """False when it was revoked before."""
        with transaction.atomic():
            changed = (
                Token.objects.filter(pk=self.pk, revoked=None).update(revoked=timezone.now()) == 1
            )
            if changed:
                record("token.revoke", self, actor=actor)
        return changed


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
