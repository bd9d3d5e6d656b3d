"""Find the weights from before a person's first update, from which a run may begin again."""

from datetime import datetime, timedelta

from coordinator.accounts.models import User
from coordinator.fleet.models import Membership
from coordinator.runs.models import Run
from coordinator.telemetry.checkpoints import (
    MAX_CHECKPOINTS,
    Checkpoint,
    CheckpointHolder,
    list_checkpoint_rows,
)

MIRROR_DELAY = timedelta(hours=1)  # after which this site knows who has joined at another mirror


def find_weights_before(run: Run, person: User) -> Checkpoint | None:
    """Return the newest checkpoint that contains no update of a person.

    Nobody has published an update before their first machine joined. Weights that the run owner's
    machine holds come first: it can compute them again from the updates since.

    Returns:
        None when there is none that the owner's machine holds or people confirm.
    """
    joined = _first_join(run, person)
    if joined is None:
        return None
    before = [
        row
        for row in list_checkpoint_rows(run, MAX_CHECKPOINTS)
        if row.checkpoint.announced < joined and not row.disputed
    ]
    held = CheckpointHolder.objects.filter(
        checkpoint__in=[row.checkpoint for row in before], machine__owner=run.owner_id
    )
    held_by_owner = {*held.values_list("checkpoint", flat=True)}
    own = [row.checkpoint for row in before if row.checkpoint.pk in held_by_owner]
    confirmed = [row.checkpoint for row in before if row.confirmed]
    return next(iter([*own, *confirmed]), None)


def _first_join(run: Run, person: User) -> datetime | None:
    members = Membership.everywhere.filter(run=run, machine__owner=person)
    times = [
        joined - MIRROR_DELAY if mirror else joined
        for joined, mirror in members.values_list("joined", "mirror")
    ]
    return min(times, default=None)
