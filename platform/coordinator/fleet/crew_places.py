"""Where a machine's crew is: the lead for which it holds blocks in a run."""

from dataclasses import dataclass

from coordinator.accounts.models import Machine
from coordinator.fleet.models import Membership


@dataclass(frozen=True)
class CrewPlace:
    """A member's place in a crew, as the crew's lead reports it."""

    lead: Machine
    first_block: int
    last_block: int


def find_crew_place(member: Membership) -> CrewPlace | None:
    """Find the crew in which a machine is a member now; a query for a run where it ever was."""
    if not member.in_crew:
        return None
    key = member.machine.key[:16]
    leads = Membership.everywhere.newest().filter(
        run=member.run_id, figures__contains={"crew": [{"key": key}]}
    )
    for lead in leads.exclude(machine=member.machine_id).select_related("machine__owner", "run"):
        seat = next(seat for seat in lead.figures["crew"] if seat["key"] == key)
        first = seat["first_block"]
        if lead.is_alive and seat["connected"]:
            return CrewPlace(lead.machine, first, first + seat["blocks"] - 1)
    return None
