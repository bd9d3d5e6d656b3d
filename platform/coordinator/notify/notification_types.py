"""What people can be told of."""

from dataclasses import dataclass, field
from typing import Any

from django.db.models import TextChoices


class NotificationType(TextChoices):
    """The value is also a webhook's `type`; the label is what the page of choices says."""

    MACHINE_QUIET = "machine.quiet", "A machine of yours went quiet"
    RUN_STARTED = "run.started", "A run of yours, or one your machines are in, started"
    RUN_STALLED = "run.stalled", "A run of yours stalled: no machine reports"
    RUN_FINISHED = "run.finished", "A run of yours, or one your machines are in, ended"
    TICKET_REFUSED = "ticket.refused", "A machine of yours was refused a place in a run"


@dataclass(frozen=True)
class NotificationDraft:
    """Something for one person. `key` is the same whenever the same event is found again; `data` goes to webhooks."""

    person: Any
    kind: NotificationType
    key: str
    title: str
    text: str = ""
    url: str = ""  # a path of this site
    data: dict[str, Any] = field(default_factory=dict)
