"""Limit the tokens that machines can state: the rate in a ticket, and the machines of a volunteer.

A ticket allows twice what its machine is estimated or measured to train, so that no honest machine
ever comes near it. All machines of one volunteer together are limited, because a key costs nothing:
one volunteer can neither state more than a few large computers could train, nor spend a run's
budget in minutes. The run's owner, who may end the run at any time, has no such limits.
"""

import math
from datetime import timedelta

from django.conf import settings
from django.db.models import Sum
from django.utils import timezone

from barnraise.protocol.signing import ORPHANED_TICKET_GRACE_SECONDS
from coordinator.accounts.models import Machine
from coordinator.fleet.machine_state import measured_hardware
from coordinator.fleet.models import Membership, MembershipQuerySet
from coordinator.runs.estimate import estimate
from coordinator.runs.models import Run

MARGIN = 2.0  # a ticket allows so many times the expected speed
OUTGROWN = 1.5  # a ticket is replaced when its machine has reached so much less than MARGIN
UNMEASURED_FLOPS = 1e12  # of a machine that has not measured itself, in FLOP/s
FLOPS_PER_PARAMETER = 6  # of one token in training
SHORTEST_RUN_SECONDS = 600  # one volunteer cannot spend a run's budget in less
MIN_VOLUNTEER_RATE = 20_000  # tokens per second that a volunteer may state in the smallest run
MAX_RATE = (1 << 53) - 1


def ticket_rate(membership: Membership) -> int:
    """Return the most tokens per second that a machine's next ticket allows it to state."""
    run, machine = membership.run, membership.machine
    expected = math.ceil(MARGIN * expected_rate(run, machine, membership.rate))
    if run.owner_id != machine.owner_id:
        limit = volunteer_rate(run)
        share = limit // settings.VOLUNTEER_MACHINES
        others = _members_of_owner(run, machine).aggregate(sum=Sum("max_tokens_per_second"))
        expected = min(expected, max(limit - (others["sum"] or 0), share))
    return max(1, min(expected, MAX_RATE))


def has_outgrown_ticket(membership: Membership) -> bool:
    """Return whether a machine trains so fast that it may need a ticket with a higher rate."""
    return OUTGROWN * membership.rate > membership.max_tokens_per_second


def expected_rate(run: Run, machine: Machine, reported: float = 0.0) -> float:
    """Return the tokens per second that a machine is expected to train at.

    Args:
        run: the run.
        machine: the machine.
        reported: what the machine has reported from this run.
    """
    hardware = measured_hardware(machine)
    rate = 0.0
    if hardware is not None:
        rate = estimate(run.spec, [("", hardware)], 1)[0].tokens_per_second
    if not rate:
        rate = UNMEASURED_FLOPS / (FLOPS_PER_PARAMETER * run.spec.model.parameters)
    return max(rate, reported)


def volunteer_rate(run: Run) -> int:
    """Return the most tokens per second that one volunteer's machines together may state."""
    by_flops = settings.VOLUNTEER_FLOPS / (FLOPS_PER_PARAMETER * run.spec.model.parameters)
    by_budget = max(run.token_budget / SHORTEST_RUN_SECONDS, MIN_VOLUNTEER_RATE)
    return max(1, math.floor(min(by_flops, by_budget, MAX_RATE)))


def machine_limit_refusal(run: Run, machine: Machine) -> str:
    """Return why one more machine of this volunteer may not join, as a sentence; "" if it may."""
    if run.owner_id == machine.owner_id:
        return ""
    if _members_of_owner(run, machine).count() < settings.VOLUNTEER_MACHINES:
        return ""
    return (
        f"{settings.VOLUNTEER_MACHINES} machines of yours have joined the run {run.name} in the "
        "last two weeks, and this is the limit for one volunteer: use one of those"
    )


def _members_of_owner(run: Run, machine: Machine) -> MembershipQuerySet:
    """Select the other machines of a machine's owner whose tickets may still be used.

    Updates count under a ticket for some time past its expiry, see `exchange.ledger.validation`.
    """
    since = timezone.now() - timedelta(seconds=ORPHANED_TICKET_GRACE_SECONDS)
    return Membership.objects.filter(
        run=run, machine__owner=machine.owner_id, ticket_expires__gt=since
    ).exclude(machine=machine)
