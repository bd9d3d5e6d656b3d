"""Settings of the whole site that the staff change: one row."""

from typing import Any
from uuid import UUID

from django.db import models, transaction

from coordinator.audit.log import record

SETTINGS_ID = UUID(int=0)


class SiteSettings(models.Model):
    """The settings, which are not replicated: each mirror has its own."""

    class Organisers(models.TextChoices):
        """Who may create runs."""

        EVERYBODY = "everybody", "Everybody with an account"
        GRANTED = "granted", "Organisers only"

    id = models.UUIDField(primary_key=True, default=SETTINGS_ID, editable=False)
    organisers = models.CharField(
        "who may create runs", max_length=10, choices=Organisers, default=Organisers.EVERYBODY
    )

    class Meta:
        verbose_name = verbose_name_plural = "site settings"

    def __str__(self) -> str:
        return "Site settings"

    @classmethod
    def current(cls) -> "SiteSettings":
        """Return the settings in force."""
        return cls.objects.filter(pk=SETTINGS_ID).first() or cls()

    @classmethod
    def set_organisers(cls, organisers: str, actor: Any) -> bool:
        """Change who may create runs; False if that is the setting already."""
        with transaction.atomic():
            row, _ = cls.objects.select_for_update().get_or_create(pk=SETTINGS_ID)
            before = row.organisers
            row.organisers = cls.Organisers(organisers)
            if before == organisers:
                return False
            row.save()
            record("site.settings", row, actor=actor, before=before, after=organisers)
        return True
