"""Whether a run's machines have suspended it: its tokens grew faster than machines can train."""

from collections.abc import Hashable, Iterable

from barnraise.protocol.enums import Activity, RunStatus
from coordinator.fleet.models import Membership
from coordinator.fleet.people_count import count_votes
from coordinator.runs.models import Run


def is_suspended(run: Run) -> bool:
    """Return whether the machines of at least half of the people who take part report so."""
    alive = Membership.objects.alive_in(run).values_list("machine__owner", "activity")
    return run.state is RunStatus.TRAINING and reports_suspension(alive)


def reports_suspension(machines: Iterable[tuple[Hashable, str]]) -> bool:
    """Return whether at least half of the people are suspended, by each (person, activity)."""
    suspended, people = count_votes(
        (person, activity == Activity.SUSPENDED) for person, activity in machines
    )
    return suspended > 0 and 2 * suspended >= people
