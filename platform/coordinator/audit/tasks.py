"""Delete old entries of the audit log, once a day."""

from datetime import timedelta

from celery import shared_task
from django.conf import settings
from django.utils import timezone

from coordinator.audit.models import AuditEntry

BATCH_SIZE = 5_000  # rows in one statement, so that nobody who decides something waits for it


@shared_task(name="audit.delete_old_entries", time_limit=300)
def delete_old_entries() -> int:
    """Delete entries older than AUDIT_DAYS (0: never); return how many.

    If the task is interrupted, it continues the next day.
    """
    if not settings.AUDIT_DAYS:
        return 0
    limit = timezone.now() - timedelta(days=settings.AUDIT_DAYS)
    old = AuditEntry.objects.filter(at__lt=limit).order_by("at")
    deleted = 0
    while batch := list(old.values_list("pk", flat=True)[:BATCH_SIZE]):
        deleted += AuditEntry.objects.filter(pk__in=batch).delete()[0]
    return deleted
