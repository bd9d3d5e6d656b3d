"""Limit the tokens that machines can state: the rate in a ticket, and the machines of a volunteer.

A ticket allows twice what its machine is estimated or measured to train, so that no honest machine
ever comes near it. All machines of one volunteer together are limited, because a key costs nothing:
one volunteer can neither state more than a few large computers could train, nor spend a run's
budget in minutes. The run's owner, who may end the run at any time, has no such limits.

The limit of a volunteer holds exactly, over all tickets that an update may still name. Mirrors do
not ask each other before they sign a ticket, so each of them hands out an equal part of it.
"""

import math
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import Q, Sum
from django.utils import timezone

from barnraise.protocol.signing import ORPHANED_TICKET_GRACE_SECONDS
from coordinator.accounts.models import Machine
from coordinator.fleet.machine_state import measured_hardware
from coordinator.fleet.models import Membership, MembershipQuerySet
from coordinator.replication import mirror_list
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
    """Return the most tokens per second that a machine's next ticket allows it to state.

    It is never less than an earlier ticket allows that updates may still name. The caller holds a
    lock on the volunteer's tickets, see `directives.renew_ticket`.
    """
    run, machine = membership.run, membership.machine
    rate = math.ceil(MARGIN * expected_rate(run, machine, membership.rate))
    if run.owner_id != machine.owner_id:
        others = _members_of_owner(run, machine)
        allowed = others.aggregate(sum=Sum("max_tokens_per_second"))["sum"] or 0
        # One token per second is left for each machine that may still join.
        may_join = max(0, _most_machines(run) - 1 - others.count())
        rate = min(rate, mirror_share(run) - allowed - may_join)
    expires = membership.ticket_expires
    earlier = membership.max_tokens_per_second if expires and expires > _usable_since() else 0
    return max(1, earlier, min(rate, MAX_RATE))


def has_outgrown_ticket(membership: Membership) -> bool:
    """Return whether a machine trains so fast that it may need a ticket with a higher rate."""
    return OUTGROWN * membership.rate > membership.max_tokens_per_second


def expected_rate(run: Run, machine: Machine, reported: float = 0.0) -> float:
    """Return the tokens per second that a machine is expected to train at, at least `reported`."""
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


def mirror_share(run: Run) -> int:
    """Return the part of `volunteer_rate` that the tickets of this site may allow."""
    newest = mirror_list.newest_list()
    return max(1, volunteer_rate(run) // max(1, len(newest.active) if newest else 1))


def machine_limit_refusal(run: Run, machine: Machine) -> str:
    """Return why one more machine of this volunteer may not join, as a sentence; "" if it may.

    Machines that report to other mirrors count, as far as this site has heard of them.
    """
    if run.owner_id == machine.owner_id:
        return ""
    most, since = _most_machines(run), _usable_since()
    has_ticket = Q(ticket_expires__gt=since) | (~Q(mirror="") & Q(last_seen__gt=since))
    others = Membership.everywhere.filter(has_ticket, run=run, machine__owner=machine.owner_id)
    if others.exclude(machine=machine).values("machine").distinct().count() < most:
        return ""
    return (
        f"{most} machines of yours have joined the run {run.name} in the last two weeks, and this "
        "is the limit for one volunteer: use one of those"
    )


def _most_machines(run: Run) -> int:
    """Return how many machines of one volunteer may join: each states a token per second."""
    return min(settings.VOLUNTEER_MACHINES, mirror_share(run))


def _members_of_owner(run: Run, machine: Machine) -> MembershipQuerySet:
    """Select the other machines of a machine's owner whose tickets may still be used."""
    return Membership.objects.filter(
        run=run, machine__owner=machine.owner_id, ticket_expires__gt=_usable_since()
    ).exclude(machine=machine)


def _usable_since() -> datetime:
    """Return the earliest expiry of a ticket that a new update may name.

    Updates count under a ticket for some time past its expiry, see `ledger.validation`.
    """
    return timezone.now() - timedelta(seconds=ORPHANED_TICKET_GRACE_SECONDS)
