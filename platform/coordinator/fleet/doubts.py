"""Find people whose updates a run's machines withhold, by the reports of people the owner knows.

The machines decide by their signed opinions (`barnraise.ledger.suspension`). Accounts that the
run's owner has not let in have no say here, however many there are.
"""

from collections.abc import Iterable, Mapping
from uuid import UUID

from barnraise.protocol.enums import Standing
from coordinator.accounts.models import User
from coordinator.fleet.models import Membership
from coordinator.replication.volunteer_salt import volunteer_pseudonyms
from coordinator.runs.models import Run

MIN_WITNESSES = 2  # invited people whose machines report it, unless one is the owner's


def find_suspended_people(run: Run) -> list[User]:
    """Return the people whose updates are withheld until the run's owner decides."""
    newest = Membership.everywhere.newest().alive_in(run).select_related("machine__owner")
    reports: list[tuple[User, list[str]]] = [
        (member.machine.owner, member.exchange["suspended"])
        for member in newest
        if member.exchange and member.exchange.get("suspended")
    ]
    if not reports:
        return []
    standings = {person.pk: run.standing_of(person) for person, _ in reports}
    named = [(person.pk, start) for person, starts in reports for start in starts]
    people = User.objects.filter(machines__memberships__run=run).distinct()
    pseudonyms = volunteer_pseudonyms(person.pk for person in people)
    return [
        person
        for person in people
        if is_suspended_person(person.pk, pseudonyms[person.pk], named, standings)
    ]


def is_suspended_person(
    person: UUID,
    pseudonym: str,
    named: Iterable[tuple[UUID, str]],
    standings: Mapping[UUID, Standing],
) -> bool:
    """Return whether the owner's machine, or two invited people's, report a person as suspended.

    Args:
        person: Whose updates may be withheld.
        pseudonym: The person's, as tickets name it.
        named: The owner of each machine that reports somebody, and the start of the pseudonym.
        standings: What the run's owner knows of those people.
    """
    witnesses = {other for other, start in named if pseudonym.startswith(start)}
    known = [standings[other] for other in witnesses if other != person]
    return Standing.OWNER in known or known.count(Standing.INVITED) >= MIN_WITNESSES
