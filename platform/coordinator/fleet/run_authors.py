"""The authors of a run: the incarnations of its machines, each with updates of its own."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from django.db import models

from barnraise.errors import SpecError
from coordinator.fleet.marked_names import KEY_DIGITS, isolate_name
from coordinator.fleet.verdict_requests import AUTHOR
from coordinator.runs.models import Run


@dataclass(frozen=True)
class AuthorChoice:
    """One incarnation of a machine in a run, to choose from; its updates are numbered from 1.

    `is_present`: the machine trains as this incarnation now.
    """

    author: str
    machine: str
    person: str
    updates: int
    is_present: bool

    def __str__(self) -> str:
        incarnation = "" if self.is_present else f", its earlier incarnation {self.author[-16:-8]}…"
        plural = "" if self.updates == 1 else "s"
        name = f"{self.machine} of {isolate_name(self.person)} ({self.author[:KEY_DIGITS]})"
        return f"{name}{incarnation}: {self.updates} update{plural}"


def list_authors(run: Run, most: int = 500) -> list[AuthorChoice]:
    """List the authors of a run, the most recently seen machines first."""
    members = (
        run.memberships.exclude(incarnation="")
        .select_related("machine__owner")
        .order_by("-last_seen")[:most]
    )
    authors = [
        AuthorChoice(
            author=f"{member.machine.key}.{incarnation}",
            machine=member.machine.name,
            person=member.machine.owner.shown_name,
            updates=updates,
            is_present=incarnation == member.incarnation,
        )
        for member in members
        for incarnation, updates in _present_first(
            member.updates_by_incarnation, member.incarnation
        )
    ]
    return authors[:most]


def _present_first(
    updates_by_incarnation: Mapping[str, int], present: str
) -> list[tuple[str, int]]:
    return sorted(updates_by_incarnation.items(), key=lambda item: (item[0] != present, item))


def resolve_author(run: Run, name: str) -> str:
    """Return the author, KEY.INCARNATION, that a person means.

    The name is an author; or a machine's id, name, or the beginning of its key, for its present
    incarnation.

    Raises:
        SpecError: no machine of the run, or more than one, is called so.
    """
    if AUTHOR.fullmatch(name):
        return name
    matches = models.Q(machine__hostname=name)
    if re.fullmatch(r"[0-9a-f]{8,64}", name):
        matches |= models.Q(machine__key__startswith=name)
    if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", name):
        matches |= models.Q(machine=name)
    members = run.memberships.filter(matches).exclude(incarnation="").select_related("machine")
    candidates = list(members[:2])
    if len(candidates) != 1:
        count = len(candidates) or "no"
        raise SpecError(
            {"author": f"{count} machines of this run are called '{name[:60]}': give its key"}
        )
    return f"{candidates[0].machine.key}.{candidates[0].incarnation}"


def count_incarnation_updates(
    before: Mapping[str, int], incarnation: str, updates: int, most: int = 64
) -> dict[str, int]:
    """Return how many updates each incarnation of a machine has published, after a new report.

    A report counts the updates of all incarnations together; the earlier ones' are known.
    """
    others = {name: count for name, count in before.items() if name != incarnation}
    count = max(before.get(incarnation, 0), updates - sum(others.values()))
    return dict(sorted(others.items())[: most - 1]) | {incarnation: count}
