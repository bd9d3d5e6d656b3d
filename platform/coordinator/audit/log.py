"""Write to the audit log: one function for every decision of the site."""

from typing import Any

from django.apps import apps
from django.contrib.admin.models import ADDITION, DELETION, LogEntry
from django.db import models

from coordinator.audit.models import AuditEntry
from coordinator.lib import request_id

MAX_TEXT_CHARS = 1000  # of one text in a detail; what people type elsewhere is shorter
MAX_NAME_CHARS = 200
ADMIN_ACTIONS = {ADDITION: "add", DELETION: "delete"}


def record(
    action: str, subject: models.Model, *, actor: Any = None, machine: Any = None, **detail: Any
) -> AuditEntry:
    """Record that somebody did `action` to `subject`.

    Call it inside the transaction that makes the change, so that both are stored or neither is.

    Args:
        action: A dotted word such as "run.pause".
        subject: What was changed.
        actor: The user; an anonymous one counts as None.
        machine: The machine, if one decided.
        detail: Anything that JSON can hold, and times and UUIDs; never an address or a secret,
            because staff read it and it outlives people.
    """
    return AuditEntry.objects.create(
        action=action,
        subject_kind=subject._meta.model_name,
        subject_id=str(subject.pk),
        subject_name=_make_storable(str(subject))[:MAX_NAME_CHARS],
        actor=actor if getattr(actor, "pk", None) else None,
        machine=machine,
        detail=_make_storable(detail),
        request_id=request_id.current(),
    )


def anonymise(*subjects: models.Model) -> int:
    """Remove names and details from the entries about these subjects; return how many changed.

    That something happened remains recorded, to whom does not.
    """
    about_subjects = models.Q(pk=None)
    for subject in subjects:
        about_subjects |= models.Q(
            subject_kind=subject._meta.model_name, subject_id=str(subject.pk)
        )
    return AuditEntry.objects.filter(about_subjects).update(subject_name="", detail={})


def on_admin_change(sender: type, instance: LogEntry, created: bool, **kwargs: Any) -> None:
    """Record what a superuser changes in third-party models, such as Celery's schedule.

    Our own models record their changes themselves.
    """
    content_type = instance.content_type
    app_label = content_type.app_label if content_type else ""  # pyright: ignore[reportAttributeAccessIssue] - the stub does not know content types
    if not created or apps.is_installed(f"coordinator.{app_label}"):
        return
    record(
        f"admin.{ADMIN_ACTIONS.get(instance.action_flag, 'change')}",
        instance,
        actor=instance.user,
        what=f"{app_label}.{content_type.model if content_type else ''}",
        id=instance.object_id,
        name=instance.object_repr,
        change=instance.get_change_message(),
    )


def _make_storable(value: Any) -> Any:
    """Remove NUL, which Postgres cannot store, and cut long texts, in nested JSON."""
    if isinstance(value, str):
        return value.replace("\0", "")[:MAX_TEXT_CHARS]
    if isinstance(value, dict):
        return {_make_storable(str(name)): _make_storable(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_make_storable(item) for item in value]
    return value
