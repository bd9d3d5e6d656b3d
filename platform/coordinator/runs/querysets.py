"""Querysets of runs: which a person may see, and how to find one by id or slug."""

import re
from typing import Any

from django.db import models
from django.db.models import Q

from coordinator.accounts.models import Machine
from coordinator.lib.slugs import normalize_slug
from coordinator.runs.invitations import Guest
from coordinator.runs.join_policy import Access, Visibility

ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class RunQuerySet(models.QuerySet):
    """Runs."""

    def visible_to(self, user: Any) -> "RunQuerySet":
        """Select the runs whose pages a person may open.

        Everybody sees launched runs, unless their owner shows them to participants only. Only the
        owner and staff see a draft, or a run that was cancelled as a draft.
        """
        if getattr(user, "acts_as_staff", False):
            return self
        return self._visible_to_person(getattr(user, "pk", None))

    def visible_to_machine(self, machine: Machine) -> "RunQuerySet":
        """Select what a machine may see: what its owner sees as a volunteer."""
        return self._visible_to_person(machine.owner_id)

    def listed_for(self, user: Any) -> "RunQuerySet":
        """Select the runs that lists show to a person: no archived ones, and no unlisted ones.

        The owner, participants and staff find unlisted runs in their lists.
        """
        return self.mentioned_to(user).filter(archived=None)

    def mentioned_to(self, user: Any) -> "RunQuerySet":
        """Select the runs that pages about something else may name to a person.

        People who have the address of an unlisted run may open its page. Other pages hide it.
        """
        visible = self.visible_to(user)
        if getattr(user, "acts_as_staff", False):
            return visible
        person = getattr(user, "pk", None)
        related = Q(owner=person) | self._takes_part(person) if person else Q(pk=None)
        return visible.filter(Q(visibility=Visibility.PUBLIC) | related)

    def _visible_to_person(self, person: Any) -> "RunQuerySet":
        launched = ~Q(spec_text="")
        if person is None:
            return self.filter(launched).exclude(visibility=Visibility.INVITED)
        shown = ~Q(visibility=Visibility.INVITED) | self._takes_part(person)
        return self.filter(Q(owner=person) | launched & shown)

    def _takes_part(self, person: Any) -> Q:
        """Return the condition that a person was invited, or has a machine in the run."""
        runs = self.model._default_manager
        guest_of = Guest.objects.filter(user=person).values("run")
        team_runs = runs.filter(access=Access.TEAM, team__members__person=person).values("pk")
        joined = runs.filter(memberships__machine__owner=person).values("pk")
        return Q(pk__in=guest_of) | Q(pk__in=team_runs) | Q(pk__in=joined)

    def find(self, name: str) -> Any:
        """Return the run of this id or slug; None if there is none."""
        lookup = lookup_for_name(name)
        return self.filter(**lookup).first() if lookup else None


def lookup_for_name(name: str) -> dict[str, str] | None:
    """Return the filter that finds a run by id or slug; None if no run can have this name."""
    if not name.isprintable() or len(name) > 100:
        return None
    return {"pk": name} if ID.fullmatch(name) else {"slug": normalize_slug(name)}
