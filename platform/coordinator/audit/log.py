"""Writing to the audit log: one function for every decision of the site."""

from typing import Any

from django.db import models

from coordinator.audit.models import AuditEntry
from coordinator.lib import request_id

LONGEST = 1000  # characters of one text in a detail; what people type elsewhere is shorter


def record(
    action: str, subject: models.Model, *, actor: Any = None, machine: Any = None, **detail: Any
) -> AuditEntry:
    """Notes that `actor` (a user; nobody logged in counts as None) or `machine` did `action` to `subject`.

    Call it inside the transaction that makes the change, so that both are there or neither. `detail` is whatever JSON
    can hold, and times and UUIDs; never an address or a secret: staff read it, and it outlives people."""
    return AuditEntry.objects.create(
        action=action,
        subject_kind=subject._meta.model_name,
        subject_id=str(subject.pk),
        subject_name=_plain(str(subject))[:200],
        actor=actor if getattr(actor, "pk", None) else None,
        machine=machine,
        detail=_plain(detail),
        request_id=request_id.current(),
    )


def anonymise(*subjects: models.Model) -> int:
    """Takes names and details out of what was noted about these: that something happened stays, to whom does not."""
    found = models.Q(pk=None)
    for subject in subjects:
        found |= models.Q(subject_kind=subject._meta.model_name, subject_id=str(subject.pk))
    return AuditEntry.objects.filter(found).update(subject_name="", detail={})


def _plain(value: Any) -> Any:
    """Postgres holds no NUL in texts, and a text from outside may have one; none needs to be endless either."""
    if isinstance(value, str):
        return value.replace("\0", "")[:LONGEST]
    if isinstance(value, dict):
        return {_plain(str(name)): _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple | set) else value
