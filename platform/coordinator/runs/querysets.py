"""Which runs somebody may see, join, or find by a name."""

import re

from django.db import models
from django.db.models import Q

from coordinator.accounts.models import Machine

ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class RunQuery(models.QuerySet):
    def visible_to(self, user) -> "RunQuery":
        """Everybody sees launched runs; drafts (and runs cancelled as drafts) are their owner's and the staff's."""
        if getattr(user, "is_staff", False):
            return self
        mine = Q(owner=user) if getattr(user, "pk", None) else Q(pk=None)
        return self.filter(mine | ~Q(spec_text=""))

    def visible_to_machine(self, machine: Machine) -> "RunQuery":
        """As `visible_to`, but a machine has no staff's eyes: of drafts it sees its owner's alone."""
        return self.filter(Q(owner=machine.owner_id) | ~Q(spec_text=""))

    def listed(self) -> "RunQuery":
        """Without those that were put away."""
        return self.filter(archived=None)

    def named(self, name: str):
        """The run of this id or slug; None when there is none."""
        column = name_of(name)
        return self.filter(**column).first() if column else None


def name_of(name: str) -> dict[str, str] | None:
    """What to look for where a run is named: its id, or its slug. None for what no run is called."""
    if not re.fullmatch(r"[0-9A-Za-z_-]{1,100}", name):
        return None
    return {"pk": name} if ID.fullmatch(name) else {"slug": name}
