"""What the staff tell everybody."""

from django.conf import settings
from django.db import models, transaction
from django.db.models import Q
from django.utils import timezone
from uuid6 import uuid7

from coordinator.audit.log import record


class Announcement(models.Model):
    """Shown above every page from `starts` until `ends`."""

    class Tone(models.TextChoices):
        NEWS = "news", "News"
        WARNING = "warning", "Warning"
        TROUBLE = "trouble", "Trouble"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    text = models.CharField(max_length=300)
    tone = models.CharField(max_length=10, choices=Tone, default=Tone.NEWS)
    starts = models.DateTimeField(default=timezone.now)
    ends = models.DateTimeField(null=True, blank=True, help_text="Empty: until it is withdrawn.")
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
    def current(cls) -> models.QuerySet:
        now = timezone.now()
        return cls.objects.filter(Q(ends=None) | Q(ends__gt=now), starts__lte=now)[:3]

    def publish(self, actor) -> None:
        """For the first time, or changed."""
        word = "publish" if self._state.adding else "change"
        with transaction.atomic():
            self.by = actor
            self.save()
            record(
                f"announcement.{word}",
                self,
                actor=actor,
                text=self.text,
                tone=self.tone,
                ends=self.ends,
            )

    def withdraw(self, actor) -> bool:
        """False when it was over already."""
        with transaction.atomic():
            open_still = Announcement.objects.filter(
                Q(ends=None) | Q(ends__gt=timezone.now()), pk=self.pk
            )
            if changed := open_still.update(ends=timezone.now()) == 1:
                record("announcement.withdraw", self, actor=actor)
        self.refresh_from_db()
        return changed
