"""A machine enters a run, and what it is told about the others in it."""

from datetime import timedelta

from django.utils import timezone

from barnraise.protocol import coordinator_messages, enums, messages, reports
from coordinator.accounts.models import Machine
from coordinator.fleet.machine_state import Measured, rests
from coordinator.fleet.models import Membership
from coordinator.fleet.run_broadcast import PEERS, common
from coordinator.runs import tickets
from coordinator.runs.models import Run

SOLD_AS = 0.9  # of what a PC is sold with, its programs see so much at the least


def join(run: Run, machine: Machine, request: coordinator_messages.JoinRequest) -> Membership:
    """The machine's membership, its addresses brought up to date. Who may join is the caller's to check."""
    if request.hardware:
        Measured.note(machine, request.hardware)
    now = timezone.now()
    said = {"addresses": list(request.addresses), "version": request.version, "last_seen": now}
    membership, created = Membership.objects.get_or_create(run=run, machine=machine, defaults=said)
    if not created:
        said["activity"] = enums.Activity.JOINING
        Membership.objects.filter(pk=membership.pk).update(**said)
        membership.refresh_from_db()
    return membership


def refusal(run: Run, machine: Machine, told: reports.HardwareView | None = None) -> str:
    """Why this machine may not join, as a sentence for its owner; "" where it may. Its owner's machines may always: one
    of them prepares the text. Who is in stays in, whatever the run has come to ask since. `told`: what it can do."""
    if (
        run.owner_id == machine.owner_id
        or Membership.objects.filter(run=run, machine=machine).exists()
    ):
        return ""
    if not run.open_to(machine.owner):
        return f"the run {run.name} {run.circle}: ask {run.owner.shown_name} to let you in"
    return short_of(run, *_memory(machine, told))


def short_of(run: Run, memory: int, device_memory: int) -> str:
    """What a machine of so many bytes lacks of the least that this run's owner asks for; "" for nothing."""
    for what, has, least in (
        ("memory", memory, run.least_memory),
        ("GPU memory", device_memory, run.least_device_memory),
    ):
        if has < SOLD_AS * least:
            return f"the run {run.name} asks for {_gigabytes(least)} of {what}; this machine has {_gigabytes(has)}"
    return ""


def _memory(machine: Machine, told: reports.HardwareView | None) -> tuple[int, int]:
    """Bytes of RAM and of GPU memory, as the machine says now, said when it measured itself, or when it enrolled."""
    if told is None and (before := getattr(machine, "measured", None)):
        told = reports.HardwareView.model_validate(before.told)
    return (told.memory, told.device_memory) if told else (machine.memory_bytes, 0)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def moved(membership: Membership, addresses: list[str]) -> None:
    """Where a machine can be reached, as its newest report says: others hear of it at once, not a rollup later."""
    if membership.addresses != addresses:
        Membership.objects.filter(pk=membership.pk).update(addresses=addresses)


def fresh_ticket(membership: Membership, *, always: bool = False) -> messages.Signed | None:
    """A new ticket when the last one nears its end (or always). None while the run is a draft, or over."""
    now = timezone.now()
    nears_end = not membership.ticket_expires or (
        membership.ticket_expires - now < timedelta(seconds=tickets.RENEW_SECONDS)
    )
    if (
        not membership.run.spec_text
        or membership.run.state is enums.RunStatus.CANCELLED
        or not (always or nears_end)
    ):
        return None
    expires = now + timedelta(seconds=tickets.TICKET_SECONDS)
    Membership.objects.filter(pk=membership.pk).update(ticket_expires=expires)
    return tickets.ticket(membership.run, membership.machine, now.timestamp())


def directive(membership: Membership) -> messages.Signed:
    run, machine = membership.run, membership.machine
    gone = common(run).revoked
    return tickets.directive(run, machine, gone, prepares(membership), rests=rests(machine))


def prepares(membership: Membership) -> bool:
    """Whether this machine should build the text: one of the owner's at a time, while the run is a draft without it."""
    run = membership.run
    if (
        run.state is not enums.RunStatus.DRAFT
        or run.manifest is not None
        or membership.machine.owner_id != run.owner_id
    ):
        return False
    theirs = (
        Membership.objects.alive_in(run)
        .filter(machine__owner=run.owner_id)
        .order_by("joined", "pk")
    )
    return theirs.first() == membership


def hints(membership: Membership) -> list[messages.Peer]:
    """Others to try: those seen last first."""
    return [peer for peer in common(membership.run).peers if peer.key != membership.machine.key][
        :PEERS
    ]
