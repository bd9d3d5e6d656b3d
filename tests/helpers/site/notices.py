"""Notify people as the site's tasks do."""

from coordinator.notify.models import Notification
from coordinator.notify.notification_types import NotificationDraft, NotificationType


def notify(
    person,
    kind: NotificationType = NotificationType.RUN_STARTED,
    key: str = "one",
    title: str = "It started",
    **fields,
) -> Notification | None:
    """Notify a person of an event, and return the notification if it is a new one."""
    return Notification.create_once(NotificationDraft(person, kind, key, title, **fields))
