"""Notices, choices and webhooks are a person's own, and go with them."""

from coordinator.eventlog import writer as mirrors
from coordinator.eventlog.projection import current_state
from coordinator.notify.models import Notification, NotificationPreference, Webhook


def forget(sender, person, **rest) -> None:
    for hook in person.webhooks.all():
        mirrors.record("webhook.remove", hook.pk, {})
    if current_state(f"wish:{person.pk}"):
        mirrors.record("wish.forget", person.pk, {})
    for kind in (Notification, NotificationPreference, Webhook):
        kind.objects.filter(person=person).delete()
