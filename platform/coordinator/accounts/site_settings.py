"""What the staff decide for the whole site: one row."""

from uuid import UUID

from django.db import models, transaction

from coordinator.audit.log import record

SETTINGS_ID = UUID(int=0)


class SiteSettings(models.Model):
    """Other mirrors have rows of their own: who may create runs here is this site's affair."""

    class Organisers(models.TextChoices):
        EVERYBODY = "everybody", "Everybody who has an account"
        GRANTED = "granted", "Those whom the staff made organisers"

    id = models.UUIDField(primary_key=True, default=SETTINGS_ID, editable=False)
    organisers = models.CharField(
        "who may create runs", max_length=10, choices=Organisers, default=Organisers.EVERYBODY
    )

    class Meta:
        verbose_name = verbose_name_plural = "site rules"

    def __str__(self) -> str:
        return "The rules of this site"

    @classmethod
    def current(cls) -> "SiteSettings":
        return cls.objects.filter(pk=SETTINGS_ID).first() or cls()

    @classmethod
    def set_organisers(cls, organisers: str, actor) -> bool:
        """False when that was the rule already."""
        with transaction.atomic():
            rules, _ = cls.objects.select_for_update().get_or_create(pk=SETTINGS_ID)
            before, rules.organisers = rules.organisers, cls.Organisers(organisers)
            if before == organisers:
                return False
            rules.save()
            record("site.rules", rules, actor=actor, before=before, after=organisers)
        return True
