"""Where a machine's crews are: the runs in which it holds blocks for another machine."""

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.accounts.models import Machine
from coordinator.fleet.models import Membership
from coordinator.runs.models import Run


@dataclass(frozen=True)
class CrewPlace:
    """A member's place in a crew, as the crew's lead reports it."""

    run: Run
    lead: Machine
    first_block: int
    last_block: int


def find_crew_places(memberships: Iterable[Membership]) -> list[CrewPlace]:
    """Find the crews in which a machine is a member now; a query for each run where it ever was."""
    places = []
    for member in memberships:
        if not member.in_crew:
            continue
        key = member.machine.key[:16]
        leads = Membership.everywhere.newest().filter(
            run=member.run_id, figures__contains={"crew": [{"key": key}]}
        )
        for lead in leads.exclude(machine=member.machine_id).select_related(
            "machine__owner", "run"
        ):
            seat = next(seat for seat in lead.figures["crew"] if seat["key"] == key)
            first = seat["first_block"]
            if lead.is_alive and seat["connected"]:
                last = first + seat["blocks"] - 1
                places.append(CrewPlace(lead.run, lead.machine, first, last))
    return places
