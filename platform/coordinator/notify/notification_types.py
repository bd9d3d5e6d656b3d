"""The types of notifications, and a notification before it is stored."""

from dataclasses import dataclass, field
from typing import Any

from django.db.models import TextChoices


class NotificationType(TextChoices):
    """What people can be notified of.

    The value is also the `type` of a webhook call; the label is shown on the settings page.
    """

    MACHINE_QUIET = "machine.quiet", "One of your machines stopped reporting"
    RUN_STARTED = "run.started", "A run of yours or of your machines started"
    RUN_STALLED = "run.stalled", "A run of yours stalled: no machine reports"
    RUN_SUSPENDED = "run.suspended", "A run of yours grew faster than its machines can train"
    RUN_DOUBTED = "run.doubted", "A volunteer is suspended in a run of yours"
    RUN_FINISHED = "run.finished", "A run of yours or of your machines ended"
    RUN_DIVERGED = "run.diverged", "A machine of a run of yours gets losses that are not finite"
    RUN_RISING = "run.rising", "The validation loss of a run of yours rose three times in a row"
    RUN_BUDGET = "run.budget", "A run of yours has spent 90 % of its budget"
    MACHINE_SLOW = "machine.slow", "One of your machines trains at less than half its usual speed"
    TICKET_REFUSED = "ticket.refused", "A run refused one of your machines"


@dataclass(frozen=True)
class NotificationDraft:
    """A notification for one person."""

    person: Any
    kind: NotificationType
    # The same whenever the same event is detected again, so that a person is notified once.
    key: str
    title: str  # one line
    text: str = ""  # one or two sentences, or ""
    url: str = ""  # a path of this site, or ""
    data: dict[str, Any] = field(default_factory=dict)  # what a webhook call contains
