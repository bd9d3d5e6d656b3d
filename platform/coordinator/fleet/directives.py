"""What a site sends to a machine of a run: a fresh ticket, a directive, and peers to try."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from django.db import connection, transaction

from barnraise.protocol import enums, messages
from coordinator.accounts.models import Machine, User
from coordinator.eventlog import writer
from coordinator.fleet.machine_state import find_own_pause
from coordinator.fleet.models import Membership
from coordinator.fleet.peer_addresses import shareable_addresses
from coordinator.fleet.run_broadcast import MAX_PEER_HINTS, get_broadcast
from coordinator.fleet.token_limits import OUTGROWN, has_outgrown_ticket, ticket_rate
from coordinator.replication import mirror_list
from coordinator.runs import tickets
from coordinator.runs.models import Run


def renew_ticket(
    membership: Membership,
    *,
    always: bool = False,
    find_standing: Callable[[Run, User], enums.Standing] = Run.standing_of,
) -> messages.Signed | None:
    """Sign a ticket if the last one expires soon or allows too few tokens per second, or `always`.

    Args:
        membership: the machine's part in the run.
        always: whether to sign one in any case.
        find_standing: returns what the ticket says of the machine's owner.

    Returns:
        The signed ticket; None if the last one is fresh enough, or while the run is a draft or
        cancelled.
    """
    run = membership.run
    if not run.spec_text or run.state is enums.RunStatus.CANCELLED:
        return None
    # No update states a time before its ticket's issue: if this mirror's clock were ahead, peers
    # would hold back what the machine publishes.
    now = datetime.fromtimestamp(writer.corrected_time(), UTC)
    expires = membership.ticket_expires
    needed = tickets.RENEW_SECONDS
    if not membership.updates_sent:
        needed = tickets.TICKET_SECONDS - tickets.NEWCOMER_SECONDS
    is_fresh = expires and expires - now >= timedelta(seconds=needed)
    if is_fresh and not always and not has_outgrown_ticket(membership):
        return None
    with transaction.atomic():
        _lock_tickets(run, membership.machine)
        membership.refresh_from_db(fields=["ticket_expires", "max_tokens_per_second"])
        rate = ticket_rate(membership)
        if is_fresh and not always and rate < OUTGROWN * membership.max_tokens_per_second:
            return None  # another ticket would hardly allow more
        expires = now + timedelta(seconds=tickets.TICKET_SECONDS)
        Membership.objects.filter(pk=membership.pk).update(
            ticket_expires=expires, max_tokens_per_second=rate
        )
    standing = find_standing(run, membership.machine.owner)
    return tickets.sign_ticket(run, membership.machine, rate, now.timestamp(), standing)


def _lock_tickets(run: Run, machine: Machine) -> None:
    """Let nobody else sign tickets of the same volunteer, whose machines share a limit."""
    with connection.cursor() as cursor:
        lock = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"
        cursor.execute(lock, [f"tickets of {machine.owner_id} in {run.pk}"])


def build_directive(membership: Membership, interval: float) -> messages.Signed:
    """Sign the directive for a machine, whose next report is due in `interval` seconds."""
    run, machine = membership.run, membership.machine
    return tickets.sign_directive(
        run,
        machine,
        get_broadcast(run).revoked,
        should_prepare_text(membership),
        report_every=interval,
        pause=find_own_pause(machine),
    )


def should_prepare_text(membership: Membership) -> bool:
    """Decide whether this machine should prepare the run's text.

    While the run is a draft without a manifest, one machine of its owner prepares the text: of
    those that the owner has confirmed and that are alive, the one that joined first.
    """
    run = membership.run
    if run.state is not enums.RunStatus.DRAFT or run.manifest is not None:
        return False
    if membership.machine.owner_id != run.owner_id:
        return False
    candidates = Membership.objects.alive_in(run).filter(
        machine__owner=run.owner_id, machine__confirmed__isnull=False
    )
    return candidates.order_by("joined", "pk").first() == membership


def signing_right(run: Run, machine: Machine) -> enums.SigningRight:
    """Return whether a machine may prepare the run's text, and so sign for it as its owner."""
    if machine.owner_id != run.owner_id:
        return enums.SigningRight.REFUSED
    confirmed = machine.confirmed is not None
    return enums.SigningRight.ALLOWED if confirmed else enums.SigningRight.UNCONFIRMED


def peer_hints(membership: Membership) -> list[messages.Peer]:
    """List other machines of the run to try: some that strangers reach, then those seen last.

    Each comes with the addresses that it has proven, and with those that it shares with this
    machine's private network.
    """
    hints: list[messages.Peer] = []
    relays = mirror_list.relays_in_force()
    for peer in get_broadcast(membership.run).peers:
        if peer.key == membership.machine.key:
            continue
        addresses = shareable_addresses(
            peer.addresses, peer.source_address, membership.source_address, relays
        )
        if addresses:
            hints.append(messages.Peer(key=peer.key, addresses=addresses))
    return hints[:MAX_PEER_HINTS]
