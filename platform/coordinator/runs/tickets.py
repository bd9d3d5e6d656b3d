"""What the mirror signs for a machine in a run: tickets for its peers, directives for itself."""

import time
from collections.abc import Sequence

from barnraise.protocol import coordinator_messages, enums, messages
from coordinator.accounts.models import Machine
from coordinator.lib import site_identity
from coordinator.replication import mirror_list, volunteer_salt
from coordinator.runs.models import Run

TICKET_SECONDS = 24 * 3600
RENEW_SECONDS = 12 * 3600  # a ticket with less than this left is replaced in the next reply
RESTED = (
    enums.RunStatus.RECRUITING,
    enums.RunStatus.TRAINING,
)  # where a machine would take steps, or soon


def ticket(run: Run, machine: Machine, now: float | None = None) -> messages.Signed:
    now = time.time() if now is None else now
    return site_identity.identity().sign(
        "ticket",
        messages.Ticket(
            run=str(run.pk),
            peer=machine.key,
            machine=str(machine.pk),
            volunteer=volunteer_salt.volunteer_pseudonym(machine.owner_id),
            roles=[enums.Role.WORKER],
            issued=now,
            expires=now + TICKET_SECONDS,
            mirror=site_identity.identity().key,
        ),
    )


def directive(
    run: Run, machine: Machine, revoked: Sequence[str], prepare: bool, *, rests: bool = False
) -> messages.Signed:
    """`rests`: its owner wants this one machine to take no steps. What ends a run ends it for this one too."""
    version, listed = mirror_list.current_version()
    return site_identity.identity().sign(
        "directive",
        coordinator_messages.Directive(
            run=str(run.pk),
            machine=str(machine.pk),
            status=enums.RunStatus.PAUSED if rests and run.state in RESTED else run.state,
            revoked=list(revoked),
            prepare=prepare,
            report_every=run.report_every,
            token_budget=run.token_budget if run.extra_tokens else None,
            mirror_list_version=version,
            mirror_list_digest=listed,
            issued=time.time(),
        ),
    )
