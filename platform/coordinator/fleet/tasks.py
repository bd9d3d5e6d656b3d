"""What Celery does for machines every minute."""

from datetime import timedelta

from celery import shared_task
from django.utils import timezone

from barnraise.protocol.enums import Activity
from coordinator.fleet.models import NOT_AT_WORK, Membership

LEFT_AFTER = timedelta(days=1)  # a machine that is silent for so long has left
ADDRESSES_KEPT = timedelta(hours=1)  # the addresses of a silent machine are deleted after this


@shared_task(name="fleet.expire_memberships")
def expire_memberships() -> int:
    """Mark machines that have been silent for a day as left, and delete addresses of absent ones.

    Returns:
        How many rows changed.
    """
    now = timezone.now()
    silent = Membership.everywhere.filter(last_seen__lt=now - LEFT_AFTER)
    silent = silent.exclude(activity__in=[*NOT_AT_WORK, Activity.FINISHED])
    absent = Membership.objects.filter(last_seen__lt=now - ADDRESSES_KEPT).exclude(addresses=[])
    return silent.update(activity=Activity.LEFT) + absent.update(addresses=[], source_address="")
