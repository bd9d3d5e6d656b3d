"""Querysets of runs: which a person may see, and how to find one by id or slug."""

import re
from typing import Any

from django.db import models
from django.db.models import Q

from coordinator.accounts.models import Machine

ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class RunQuerySet(models.QuerySet):
    """Runs."""

    def visible_to(self, user: Any) -> "RunQuerySet":
        """Select what a person may see.

        Everybody sees launched runs. Only the owner and staff see a draft, or a run that was
        cancelled as a draft.
        """
        if getattr(user, "acts_as_staff", False):
            return self
        own = Q(owner=user) if getattr(user, "pk", None) else Q(pk=None)
        return self.filter(own | ~Q(spec_text=""))

    def visible_to_machine(self, machine: Machine) -> "RunQuerySet":
        """Select what a machine may see: launched runs, and only its owner's drafts."""
        return self.filter(Q(owner=machine.owner_id) | ~Q(spec_text=""))

    def listed(self) -> "RunQuerySet":
        """Leave out archived runs."""
        return self.filter(archived=None)

    def find(self, name: str) -> Any:
        """Return the run of this id or slug; None if there is none."""
        lookup = lookup_for_name(name)
        return self.filter(**lookup).first() if lookup else None


def lookup_for_name(name: str) -> dict[str, str] | None:
    """Return the filter that finds a run by id or slug; None if no run can have this name."""
    if not re.fullmatch(r"[0-9A-Za-z_-]{1,100}", name):
        return None
    return {"pk": name} if ID.fullmatch(name) else {"slug": name}
