"""Store the entries of the audit log."""

from django.conf import settings
from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.utils import timezone
from uuid6 import uuid7


class AuditEntry(models.Model):
    """Record that somebody did `action` to a subject.

    Somebody is a person, a machine, or the site itself if both are None. The subject is named by
    value, not by a foreign key, so that the entry outlives it; entries about a person lose their
    name when the account is deleted (see `log.anonymise`).
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    at = models.DateTimeField(default=timezone.now, db_index=True)
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    machine = models.ForeignKey(
        "accounts.Machine", null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    action = models.CharField(max_length=60, db_index=True)
    subject_kind = models.CharField(max_length=30)
    subject_id = models.CharField(max_length=64)
    subject_name = models.CharField(max_length=200, blank=True)
    detail = models.JSONField(default=dict, blank=True, encoder=DjangoJSONEncoder)
    request_id = models.CharField(max_length=64, blank=True, db_index=True)

    class Meta:
        ordering = ["-id"]
        verbose_name_plural = "entries"
        indexes = [models.Index(fields=["subject_kind", "subject_id"], name="audit_entry_subject")]

    def __str__(self) -> str:
        return f"{self.action} {self.subject_name or self.subject_id}"
