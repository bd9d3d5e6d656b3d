"""Find people whose updates seem useless, by the reports of the other people's machines.

Such updates are valid and state tokens. They take no weight from other updates, but they count
towards the run's budget until its owner excludes the volunteer.
"""

from collections.abc import Iterable
from uuid import UUID

from coordinator.accounts.models import User
from coordinator.fleet.models import Membership
from coordinator.fleet.people_count import count_votes
from coordinator.replication.volunteer_salt import volunteer_pseudonyms
from coordinator.runs.models import Run

MIN_WITNESSES = 2  # other people whose machines must find the same


def find_doubted_people(run: Run) -> list[User]:
    """Return the people whose updates seem useless, by the reports of other people's machines."""
    newest = Membership.everywhere.newest().alive_in(run)
    alive = newest.values_list("machine__owner", "exchange")
    reports = [(person, (exchange or {}).get("doubted")) for person, exchange in alive]
    if not any(doubted for _, doubted in reports):
        return []
    people = User.objects.filter(machines__memberships__run=run).distinct()
    pseudonyms = volunteer_pseudonyms(person.pk for person in people)
    return [person for person in people if is_doubted(person.pk, pseudonyms[person.pk], reports)]


def is_doubted(person: UUID, pseudonym: str, reports: Iterable[tuple[UUID, str | None]]) -> bool:
    """Return whether at least half of the other people, and at least two, doubt a person.

    Args:
        person: Whose updates are judged.
        pseudonym: The person's, as tickets name it.
        reports: The owner of each machine that is alive, and the start of the pseudonym that it
            doubts.
    """
    witnesses, others = count_votes(
        (other, doubted is not None and pseudonym.startswith(doubted))
        for other, doubted in reports
        if other != person
    )
    return witnesses >= MIN_WITNESSES and 2 * witnesses >= others
