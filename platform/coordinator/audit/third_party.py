"""What superusers change in the admin that is not ours (Celery's schedule): into the audit log as well."""

from django.apps import apps
from django.contrib.admin.models import ADDITION, DELETION, LogEntry

from coordinator.audit.log import record

WORDS = {ADDITION: "add", DELETION: "delete"}


def note(sender, instance: LogEntry, created: bool, **rest) -> None:
    """Our own models note their changes themselves."""
    label = instance.content_type.app_label if instance.content_type else ""
    if not created or apps.is_installed(f"coordinator.{label}"):
        return
    told = {"what": f"{label}.{instance.content_type.model if instance.content_type else ''}"}
    told |= {
        "id": instance.object_id,
        "name": instance.object_repr,
        "change": instance.get_change_message(),
    }
    record(
        f"admin.{WORDS.get(instance.action_flag, 'change')}", instance, actor=instance.user, **told
    )
