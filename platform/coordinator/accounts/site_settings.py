"""Settings of the whole site that the staff change: one row."""

from typing import Any
from uuid import UUID

from django.core.exceptions import ValidationError
from django.db import models, transaction

from coordinator.audit.log import record

SETTINGS_ID = UUID(int=0)


class SiteSettings(models.Model):
    """The settings, which are not replicated: each mirror has its own."""

    class Organisers(models.TextChoices):
        """Who may create runs."""

        EVERYBODY = "everybody", "Everybody with an account"
        GRANTED = "granted", "Organisers only"

    class SignUp(models.TextChoices):
        """Who may create an account."""

        OPEN = "open", "Everybody"
        INVITED = "invited", "People with an invitation to a run or a team"
        DOMAINS = "domains", "People with an email address of certain domains"
        CLOSED = "closed", "Nobody"

    id = models.UUIDField(primary_key=True, default=SETTINGS_ID, editable=False)
    organisers = models.CharField(
        "who may create runs", max_length=10, choices=Organisers, default=Organisers.EVERYBODY
    )
    sign_up = models.CharField(
        "who may create an account", max_length=10, choices=SignUp, default=SignUp.OPEN
    )
    sign_up_domains = models.CharField(
        "domains of email addresses",
        max_length=500,
        blank=True,
        default="",
        help_text="Such as example.org, example.com. Their subdomains do not count.",
    )

    class Meta:
        verbose_name = verbose_name_plural = "site settings"

    def __str__(self) -> str:
        return "Site settings"

    def clean(self) -> None:
        """Refuse a policy that lets nobody in by mistake."""
        if self.sign_up == self.SignUp.DOMAINS and not self.domains:
            raise ValidationError({"sign_up_domains": "Name at least one domain."})

    @property
    def domains(self) -> set[str]:
        """The domains whose addresses may sign up, in lower case."""
        names = self.sign_up_domains.replace(",", " ").lower().split()
        return {name.removeprefix("@") for name in names}

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

    @classmethod
    def set_sign_up(cls, policy: str, domains: str, actor: Any) -> bool:
        """Change who may create an account; False if that is the setting already."""
        with transaction.atomic():
            row, _ = cls.objects.select_for_update().get_or_create(pk=SETTINGS_ID)
            before = row.sign_up, row.sign_up_domains
            row.sign_up, row.sign_up_domains = cls.SignUp(policy), domains.strip()
            after = row.sign_up, row.sign_up_domains
            if before == after:
                return False
            row.save()
            record("site.sign_up", row, actor=actor, before=list(before), after=list(after))
        return True
