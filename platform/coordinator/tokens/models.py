"""Personal API tokens: what a person's scripts send instead of a password."""

import hashlib
import secrets
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import models, transaction
from django.utils import timezone
from uuid6 import uuid7

from coordinator.audit.log import record

TOKEN_PREFIX = "brn_"  # people, and scanners for leaked secrets, recognise a token by it
SCOPES = {
    "runs:read": "See the runs you may see, their machines and checkpoints",
    "runs:write": "Create, launch, pause, resume, cancel, copy and archive runs, remove updates, "
    "and invite people",
    "machines:read": "See your machines",
    "machines:write": "Rename, pause, resume and revoke your machines",
}
MAX_DAYS = 366
USE_RECORD_SECONDS = 60.0  # at least so long between two writes of `last_used`


class Token(models.Model):
    """A token. Its text is shown once and never stored; `digest` is the text's SHA-256.

    The text is a secret of 256 bits, for which a plain digest is enough.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="tokens"
    )
    name = models.CharField(max_length=60)
    digest = models.CharField(max_length=64, unique=True)
    begins = models.CharField(max_length=12)  # the start of the text, by which people recognise it
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
    def create(cls, user: Any, name: str, scopes: list[str], days: int) -> tuple["Token", str]:
        """Create a token; return it, and its text to show once.

        The caller checks that the scopes are keys of `SCOPES`, and the days at most `MAX_DAYS`.
        """
        assert set(scopes) <= set(SCOPES) and 1 <= days <= MAX_DAYS
        text = TOKEN_PREFIX + secrets.token_urlsafe(32)
        with transaction.atomic():
            token = cls.objects.create(
                user=user,
                name=name,
                digest=_digest(text),
                begins=text[:12],
                scopes=[scope for scope in SCOPES if scope in scopes],
                expires=timezone.now() + timedelta(days=days),
            )
            record("token.make", token, actor=user, scopes=token.scopes, expires=token.expires)
        return token, text

    @classmethod
    def find_by_text(cls, text: str) -> "Token | None":
        """Find the token of this text, valid or not."""
        return cls.objects.select_related("user").filter(digest=_digest(text)).first()

    @property
    def is_valid(self) -> bool:
        """Whether it is neither revoked nor expired, and its owner is active."""
        return self.revoked is None and self.expires > timezone.now() and self.user.is_active

    def record_use(self) -> None:
        """Store that the token was used now, unless that was stored a moment ago."""
        now = timezone.now()
        if self.last_used is None or (now - self.last_used).total_seconds() > USE_RECORD_SECONDS:
            Token.objects.filter(pk=self.pk).update(last_used=now)

    def revoke(self, *, actor: Any = None) -> bool:
        """Refuse the token from now on; False if it was revoked before."""
        with transaction.atomic():
            valid = Token.objects.filter(pk=self.pk, revoked=None)
            changed = valid.update(revoked=timezone.now()) == 1
            if changed:
                record("token.revoke", self, actor=actor)
        return changed


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
