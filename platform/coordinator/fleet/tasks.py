"""What Celery does for machines every minute."""

from datetime import timedelta

from celery import shared_task
from django.utils import timezone

from barnraise.protocol.enums import Activity
from coordinator.fleet.models import Membership

SILENT = timedelta(days=1)  # after which a machine that said no goodbye counts as gone for good
ADDRESSES_KEPT = timedelta(
    hours=1
)  # where a machine was reached is nobody's business once it is away


@shared_task(name="fleet.expire_memberships")
def expire_memberships() -> int:
    """Liveness: who has been silent for a day has left; who is away is not to be reached. How many rows changed."""
    now = timezone.now()
    left = Membership.everywhere.filter(last_seen__lt=now - SILENT).exclude(activity=Activity.LEFT)
    away = Membership.objects.filter(last_seen__lt=now - ADDRESSES_KEPT).exclude(addresses=[])
    return left.exclude(activity=Activity.FINISHED).update(activity=Activity.LEFT) + away.update(
        addresses=[]
    )
