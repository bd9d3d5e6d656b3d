"""Decide whether somebody trains in a run who can vouch for newcomers.

Where nobody does, the updates of those who join count at once, or the run would never begin.
"""

import time
from datetime import timedelta

from django.utils import timezone

from barnraise.protocol.enums import Standing
from coordinator.accounts.models import User
from coordinator.fleet.doubts import MIN_WITNESSES
from coordinator.fleet.models import Membership
from coordinator.runs.models import Run
from coordinator.telemetry.models import Rollup

ATTENDED_SECONDS = 3600  # since the last training of those who can vouch for newcomers
ROLLUP_WIDTH = 60  # seconds


def find_standing(run: Run, person: User) -> Standing:
    """Return what a person's ticket says: a stranger is a newcomer where others can vouch."""
    standing = run.standing_of(person)
    if standing is Standing.STRANGER and is_attended(run):
        return Standing.NEWCOMER
    return standing


def is_attended(run: Run) -> bool:
    """Return whether the owner's machine, or those of two people they let in, have trained lately.

    A machine that has just joined, and has not trained yet, counts, too: else a stranger who comes
    first would not be a newcomer.
    """
    known = {run.owner_id, *run.guests.values_list("user", flat=True)}
    members = Membership.everywhere.filter(run=run, machine__owner__in=known, machine__revoked=None)
    since = time.time() - ATTENDED_SECONDS
    trained = Rollup.objects.filter(
        membership__in=members, width=ROLLUP_WIDTH, bucket__gt=since, tokens__gt=0
    )
    people = {*trained.values_list("membership__machine__owner", flat=True).distinct()}
    begun = timezone.now() - timedelta(seconds=ATTENDED_SECONDS)
    if run.launched is None or run.launched > begun:
        starting = members.alive_in(run)
    else:
        starting = members.alive_in(run).filter(tokens=0, joined__gt=begun)
    people |= {*starting.values_list("machine__owner", flat=True)}
    return run.owner_id in people or len(people) >= MIN_WITNESSES
