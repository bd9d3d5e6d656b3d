"""Which people's updates seem useless, as the machines of a run find.

Such updates are valid and state tokens: they take no weight from others, and count towards the
run's budget until its owner excludes their volunteer.
"""

from collections import defaultdict
from collections.abc import Iterable
from uuid import UUID

from coordinator.accounts.models import User
from coordinator.fleet.models import Membership
from coordinator.replication.volunteer_salt import volunteer_pseudonyms
from coordinator.runs.models import Run

MIN_WITNESSES = 2  # other people whose machines must find the same


def find_doubted_people(run: Run) -> list[User]:
    """Return the people whose updates seem useless, as most other people's machines find."""
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
    doubts: dict[UUID, bool] = defaultdict(bool)
    for other, doubted in reports:
        if other != person:
            doubts[other] |= doubted is not None and pseudonym.startswith(doubted)
    witnesses = sum(doubts.values())
    return witnesses >= MIN_WITNESSES and 2 * witnesses >= len(doubts)
