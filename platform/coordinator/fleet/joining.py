"""A machine enters a run, and what it is told about the others in it."""

from datetime import timedelta

from django.utils import timezone

from barnraise import wire
from coordinator.accounts.models import Machine
from coordinator.fleet.models import PEERS, Membership
from coordinator.runs import tickets
from coordinator.runs.models import Run


def join(run: Run, machine: Machine, request: wire.JoinRequest) -> Membership:
    """The machine's membership, its addresses brought up to date. Who may join is the caller's to check."""
    now = timezone.now()
    said = {"addresses": list(request.addresses), "version": request.version, "last_seen": now}
    membership, created = Membership.objects.get_or_create(run=run, machine=machine, defaults=said)
    if not created:
        said["activity"] = wire.Activity.JOINING
        Membership.objects.filter(pk=membership.pk).update(**said)
        membership.refresh_from_db()
    return membership


def moved(membership: Membership, addresses: list[str]) -> None:
    """Where a machine can be reached, as its newest report says: others hear of it at once, not a rollup later."""
    if membership.addresses != addresses:
        Membership.objects.filter(pk=membership.pk).update(addresses=addresses)


def fresh_ticket(membership: Membership, *, always: bool = False) -> wire.Signed | None:
    """A new ticket when the last one nears its end (or always). None while the run is a draft, or over."""
    now = timezone.now()
    nears_end = not membership.ticket_expires or (
        membership.ticket_expires - now < timedelta(seconds=tickets.RENEW_SECONDS)
    )
    if not membership.run.spec_text or membership.run.state is wire.Status.CANCELLED or not (always or nears_end):
        return None
    expires = now + timedelta(seconds=tickets.TICKET_SECONDS)
    Membership.objects.filter(pk=membership.pk).update(ticket_expires=expires)
    return tickets.ticket(membership.run, membership.machine, now.timestamp())


def directive(membership: Membership) -> wire.Signed:
    run, machine = membership.run, membership.machine
    return tickets.directive(run, machine, revoked(run), prepares(membership))


def prepares(membership: Membership) -> bool:
    """Whether this machine should build the text: one of the owner's at a time, while the run is a draft without it."""
    run = membership.run
    if run.state is not wire.Status.DRAFT or run.manifest is not None or membership.machine.owner_id != run.owner_id:
        return False
    theirs = Membership.objects.alive().filter(run=run, machine__owner=run.owner_id).order_by("joined", "pk")
    return theirs.first() == membership


def revoked(run: Run) -> list[str]:
    """Keys that no peer of this run should speak to any more."""
    gone = Membership.objects.filter(run=run, machine__revoked__isnull=False).order_by("-machine__revoked")
    return list(gone.values_list("machine__key", flat=True)[:1000])


def hints(membership: Membership) -> list[wire.Peer]:
    """Others to try: those seen last first."""
    others = Membership.objects.alive().filter(run=membership.run).exclude(pk=membership.pk).order_by("-last_seen")
    rows = others.values_list("machine__key", "addresses")[:PEERS]
    return [wire.Peer(key=key, addresses=addresses) for key, addresses in rows if addresses]
