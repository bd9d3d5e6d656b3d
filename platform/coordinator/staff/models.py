"""Announcements of the staff to everybody."""

from typing import TYPE_CHECKING

from django.conf import settings
from django.db import models, transaction
from django.db.models import Q
from django.utils import timezone
from uuid6 import uuid7

from coordinator.audit.log import record

if TYPE_CHECKING:
    from coordinator.accounts.models import User


class Announcement(models.Model):
    """A text that is shown above every page from `starts` until `ends`."""

    class Tone(models.TextChoices):
        """How serious an announcement is."""

        NEWS = "news", "Information"
        WARNING = "warning", "Warning"
        TROUBLE = "trouble", "Incident"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    text = models.CharField(max_length=300)
    tone = models.CharField(max_length=10, choices=Tone, default=Tone.NEWS)
    starts = models.DateTimeField(default=timezone.now)
    ends = models.DateTimeField(
        null=True, blank=True, help_text="Leave empty to show it until it is withdrawn."
    )
    by = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        editable=False,
        on_delete=models.SET_NULL,
        related_name="+",
    )

    class Meta:
        ordering = ["-starts"]

    def __str__(self) -> str:
        return self.text[:60]

    @classmethod
    def current(cls) -> "models.QuerySet[Announcement]":
        """Return up to three announcements that are shown now."""
        now = timezone.now()
        return Announcement.objects.filter(Q(ends=None) | Q(ends__gt=now), starts__lte=now)[:3]

    def publish(self, actor: "User") -> None:
        """Publish a new announcement, or a changed one."""
        change = "publish" if self._state.adding else "change"
        with transaction.atomic():
            self.by = actor
            self.save()
            record(
                f"announcement.{change}",
                self,
                actor=actor,
                text=self.text,
                tone=self.tone,
                ends=self.ends,
            )

    def withdraw(self, actor: "User") -> bool:
        """Stop showing it; return False if it had ended already."""
        with transaction.atomic():
            not_ended = Announcement.objects.filter(
                Q(ends=None) | Q(ends__gt=timezone.now()), pk=self.pk
            )
            changed = not_ended.update(ends=timezone.now()) == 1
            if changed:
                record("announcement.withdraw", self, actor=actor)
        self.refresh_from_db()
        return changed
