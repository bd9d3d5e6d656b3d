"""The Django app `notify`."""

from typing import Any

from django.apps import AppConfig


class NotifyConfig(AppConfig):
    """Register the replicated types, and delete a person's data with their account."""

    name = "coordinator.notify"

    def ready(self) -> None:
        """Connect the app to the event log and to the deletion of accounts."""
        from coordinator.accounts.signals import account_deleted
        from coordinator.eventlog import registry
        from coordinator.notify.replicated import preferences, webhooks

        account_deleted.connect(on_account_deleted, dispatch_uid="notify account_deleted")
        registry.register(webhooks.AGGREGATE_TYPE, preferences.AGGREGATE_TYPE)


def on_account_deleted(sender: Any, person: Any, **kwargs: Any) -> None:
    """Delete a person's notifications, preferences and webhooks, here and at other mirrors."""
    from coordinator.eventlog import writer
    from coordinator.eventlog.projection import current_state
    from coordinator.notify.models import Notification, NotificationPreference, Webhook

    for webhook in person.webhooks.all():
        writer.record("webhook.remove", webhook.pk, {})
    if current_state(f"preference:{person.pk}"):
        writer.record("preference.delete", person.pk, {})
    for model in (Notification, NotificationPreference, Webhook):
        model.objects.filter(person=person).delete()
