"""What a run asks of those who would join it, and says to everybody. Unlike the spec it may change at any time: no peer
judges an update by it."""

from dataclasses import dataclass
from uuid import UUID

from django.db import models

from coordinator.runs import markdown

MOST_BYTES = 1 << 50


class Access(models.TextChoices):
    """Whose machines may join."""

    ANYONE = "anyone"
    INVITATION = "invitation"
    TEAM = "team"


@dataclass(frozen=True)
class Terms:
    """`least_memory` and `least_device_memory` in bytes, 0 for any machine; `notes` are Markdown. `team`:
    the id of one, where its people may join."""

    access: str = Access.ANYONE
    least_memory: int = 0
    least_device_memory: int = 0
    notes: str = ""
    team: UUID | None = None

    def problems(self) -> dict[str, str]:
        found = {}
        if self.access not in Access.values:
            found["access"] = (
                f"must be one of {', '.join(Access.values)}; '{str(self.access)[:40]}' is not"
            )
        if self.access == Access.TEAM and self.team is None:
            found["team"] = "choose the team whose machines may join"
        for name, what in (("least_memory", "memory"), ("least_device_memory", "GPU memory")):
            if not 0 <= getattr(self, name) <= MOST_BYTES:
                found[name] = f"the least {what} must be between 0 and 1,000,000 GB"
        if len(self.notes) > markdown.LONGEST:
            found["notes"] = (
                f"the notes may have {markdown.LONGEST:,} characters; these have {len(self.notes):,}"
            )
        return found

    def columns(self) -> dict:
        return {
            "access": str(self.access),
            "least_memory": self.least_memory,
            "least_device_memory": self.least_device_memory,
            "notes": markdown.plain(self.notes),
            "team_id": self.team if self.access == Access.TEAM else None,
        }


OPEN = Terms()  # for anybody with any machine
