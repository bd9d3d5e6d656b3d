"""Who may join a run, with which machines, and the owner's notes.

Unlike the spec the policy may change at any time: no peer validates an update by it. Pure.
"""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import models

from coordinator.runs import markdown

MAX_MEMORY_BYTES = 1 << 50


class Access(models.TextChoices):
    """Whose machines may join."""

    ANYONE = "anyone"
    INVITATION = "invitation"
    TEAM = "team"


class Visibility(models.TextChoices):
    """Who may see a launched run."""

    PUBLIC = "public"  # everybody, and it is listed
    UNLISTED = "unlisted"  # everybody who has its address
    INVITED = "invited"  # only people whose machines may join


@dataclass(frozen=True)
class JoinPolicy:
    """Who may join, with what."""

    access: str = Access.ANYONE  # one of `Access`
    min_memory: int = 0  # bytes of RAM; 0 for any
    min_device_memory: int = 0  # bytes of GPU memory; 0 for any
    notes: str = ""  # of the owner, Markdown
    team: UUID | None = None  # whose members' machines may join, where `access` is TEAM
    visibility: str = Visibility.PUBLIC  # one of `Visibility`

    def problems(self) -> dict[str, str]:
        """Return a sentence for each field that is not valid."""
        field_problems = {}
        if self.access not in Access.values:
            field_problems["access"] = (
                f"must be one of {', '.join(Access.values)}; '{str(self.access)[:40]}' is not"
            )
        if self.visibility not in Visibility.values:
            field_problems["visibility"] = (
                f"must be one of {', '.join(Visibility.values)}; "
                f"'{str(self.visibility)[:40]}' is not"
            )
        elif self.visibility == Visibility.INVITED and self.access == Access.ANYONE:
            field_problems["visibility"] = (
                "choose invited people or a team as participants: "
                "a run that anyone may join cannot be hidden"
            )
        if self.access == Access.TEAM and self.team is None:
            field_problems["team"] = "choose the team whose machines may join"
        for name, label in (("min_memory", "memory"), ("min_device_memory", "GPU memory")):
            if not 0 <= getattr(self, name) <= MAX_MEMORY_BYTES:
                field_problems[name] = f"the least {label} must be between 0 and 1,000,000 GB"
        if len(self.notes) > markdown.MAX_CHARACTERS:
            field_problems["notes"] = (
                f"the notes may have {markdown.MAX_CHARACTERS:,} characters; "
                f"these have {len(self.notes):,}"
            )
        return field_problems

    def to_columns(self) -> dict[str, Any]:
        """Return the policy as columns of a run."""
        return {
            "access": str(self.access),
            "min_memory": self.min_memory,
            "min_device_memory": self.min_device_memory,
            "notes": markdown.clean_markdown(self.notes),
            "team_id": self.team if self.access == Access.TEAM else None,
            "visibility": str(self.visibility),
        }


OPEN_TO_ALL = JoinPolicy()  # anybody may join, with any machine
