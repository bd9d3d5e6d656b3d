"""Notices, choices and webhooks are a person's own, and go with them."""

from django.dispatch import receiver

from coordinator.accounts.leaving import leaving
from coordinator.notify.models import Choice, Notice, Webhook


@receiver(leaving)
def forget(sender, person, **rest) -> None:
    for kind in (Notice, Choice, Webhook):
        kind.objects.filter(person=person).delete()
