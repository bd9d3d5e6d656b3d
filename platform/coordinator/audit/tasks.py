"""What Celery does for the audit log once a day."""

from datetime import timedelta

from celery import shared_task
from django.conf import settings
from django.utils import timezone

from coordinator.audit.models import AuditEntry

AT_ONCE = 5_000  # rows a statement, so that nobody who decides something waits for it


@shared_task(name="audit.retain", time_limit=300)
def retain() -> int:
    """Entries older than AUDIT_DAYS go, for good; with 0 none ever do. How many. Cut off, it goes on the next day."""
    if not settings.AUDIT_DAYS:
        return 0
    old, gone = (
        AuditEntry.objects.filter(at__lt=timezone.now() - timedelta(days=settings.AUDIT_DAYS)),
        0,
    )
    while batch := list(old.order_by("at").values_list("pk", flat=True)[:AT_ONCE]):
        gone += AuditEntry.objects.filter(pk__in=batch).delete()[0]
    return gone
