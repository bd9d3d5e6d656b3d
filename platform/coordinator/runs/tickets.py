"""Sign tickets, which a machine shows to its peers, and directives for the machine itself."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from barnraise.protocol import coordinator_messages, enums, messages
from coordinator.accounts.models import Machine
from coordinator.lib import site_identity
from coordinator.replication import mirror_list, volunteer_salt
from coordinator.runs.models import Run

TICKET_SECONDS = 24 * 3600
RENEW_SECONDS = 12 * 3600  # a ticket with less than this left is replaced in the next reply
# A newcomer, of whom no update counts yet, has another one after so long: its standing may change.
NEWCOMER_SECONDS = 3600
PAUSABLE = (
    enums.RunStatus.RECRUITING,
    enums.RunStatus.TRAINING,
)  # where a machine takes steps, or soon


@dataclass(frozen=True)
class OwnPause:
    """A pause of one machine by its owner: until seconds since 1970, or None: without an end."""

    until: float | None


def sign_ticket(
    run: Run,
    machine: Machine,
    max_tokens_per_second: int,
    now: float | None = None,
    standing: enums.Standing | None = None,
) -> messages.Signed:
    """Sign a machine's ticket for a run, valid for `TICKET_SECONDS`.

    Its updates may state at most `max_tokens_per_second`; `now` is in seconds since 1970;
    `standing` is that of its owner, by default what the run's owner knows.
    """
    now = time.time() if now is None else now
    identity = site_identity.identity()
    ticket = messages.Ticket(
        run=str(run.pk),
        peer=machine.key,
        machine=str(machine.pk),
        volunteer=volunteer_salt.volunteer_pseudonym(machine.owner_id),
        roles=[enums.Role.WORKER],
        standing=standing or run.standing_of(machine.owner),
        max_tokens_per_second=max_tokens_per_second,
        issued=now,
        expires=now + TICKET_SECONDS,
        mirror=identity.key,
    )
    return identity.sign("ticket", ticket)


def sign_directive(
    run: Run,
    machine: Machine,
    revoked: Sequence[str],
    prepare: bool,
    *,
    report_every: float,
    pause: OwnPause | None = None,
) -> messages.Signed:
    """Sign a machine's directive.

    Args:
        run: the run.
        machine: the machine.
        revoked: keys of machines whose tickets are not valid any longer.
        prepare: the machine should prepare the run's text.
        report_every: in how many seconds the machine's next report is due.
        pause: the owner has paused this one machine. A run that ends still ends for this machine
            too.
    """
    version, mirror_list_digest = mirror_list.current_version()
    is_paused = pause is not None and run.state in PAUSABLE
    directive = coordinator_messages.Directive(
        run=str(run.pk),
        machine=str(machine.pk),
        status=enums.RunStatus.PAUSED if is_paused else run.state,
        revoked=list(revoked),
        prepare=prepare,
        report_every=report_every,
        token_budget=run.token_budget if run.extra_tokens else None,
        mirror_list_version=version,
        mirror_list_digest=mirror_list_digest,
        issued=time.time(),
        own_pause=is_paused,
        pause_until=pause.until if pause is not None and is_paused else None,
    )
    return site_identity.identity().sign("directive", directive)
