"""Draft notifications about runs and machines."""

from typing import Any

from coordinator.accounts.models import Machine, User
from coordinator.notify.notification_types import NotificationDraft, NotificationType
from coordinator.runs.models import Run


def draft_for_run(
    run: Run,
    person: User,
    kind: NotificationType,
    title: str,
    text: str = "",
    *,
    episode: str = "",
) -> NotificationDraft:
    """Draft a notification about a run; `episode` tells repeated events of the run apart."""
    key = notification_key(kind, run, episode)
    return NotificationDraft(
        person, kind, key, title, text, run.get_absolute_url(), {"run": run_data(run)}
    )


def notification_key(kind: NotificationType, run: Run, episode: str = "") -> str:
    """Return the key by which a person is notified of an event of a run once."""
    return ":".join(filter(None, (kind.value, str(run.pk), episode)))


def run_data(run: Run) -> dict[str, Any]:
    """Describe a run in a webhook call."""
    return {"id": str(run.pk), "slug": run.slug, "name": run.name, "status": run.status}


def machine_data(machine: Machine) -> dict[str, Any]:
    """Describe a machine in a webhook call."""
    return {"id": str(machine.pk), "name": machine.name}
