"""Let a machine into a run: who may join, and the membership that results."""

from django.utils import timezone

from barnraise.formats import format_bytes
from barnraise.protocol import coordinator_messages, enums, reports
from coordinator.accounts.models import Machine
from coordinator.fleet.machine_state import HardwareMeasurement
from coordinator.fleet.models import Membership
from coordinator.fleet.token_limits import machine_limit_refusal
from coordinator.fleet.verdict_models import exclusion_problem
from coordinator.runs.models import Run

# Programs see at least this share of the memory that a computer is sold with.
USABLE_SHARE = 0.9


def admit_machine(
    run: Run, machine: Machine, request: coordinator_messages.JoinRequest, source_address: str = ""
) -> Membership:
    """Create the machine's membership, or bring its addresses up to date.

    The caller checks who may join (`join_refusal`).
    """
    if request.hardware:
        HardwareMeasurement.record(machine, request.hardware)
    columns = {
        "addresses": list(request.addresses),
        "source_address": source_address,
        "version": request.version,
        "last_seen": timezone.now(),
        "activity": enums.Activity.JOINING,
    }
    # A crew's member neither reports nor signs: its lead is the run's machine.
    if request.purpose is not enums.JoinPurpose.TRAIN:
        columns["activity"] = enums.Activity.FETCHING
    if request.purpose is enums.JoinPurpose.CREW:
        columns["in_crew"] = True
    membership, created = Membership.objects.get_or_create(
        run=run, machine=machine, defaults=columns
    )
    if not created:
        Membership.objects.filter(pk=membership.pk).update(**columns)
        membership.refresh_from_db()
    return membership


def join_refusal(
    run: Run,
    machine: Machine,
    hardware: reports.HardwareView | None = None,
    purpose: enums.JoinPurpose = enums.JoinPurpose.TRAIN,
) -> str:
    """Return why this machine may not join, as a sentence for its owner; "" if it may.

    The run owner's machines always may: one of them prepares the text. Nobody may whom a verdict
    excludes. A machine that has joined stays in, whatever the join policy has become since.
    """
    if run.owner_id == machine.owner_id:
        return ""
    excluded = exclusion_problem(run, machine.key, machine.owner_id)
    if excluded:
        return excluded
    if Membership.objects.filter(run=run, machine=machine).exists():
        return ""
    if not run.accepts_machines_of(machine.owner):
        return (
            f"the run {run.name} {run.access_description}: ask {run.owner.shown_name} to let you in"
        )
    if sentence := machine_limit_refusal(run, machine):
        return sentence
    if purpose is enums.JoinPurpose.CREW:  # which holds a part of the model
        return ""
    return memory_shortfall(run, *_memory_bytes(machine, hardware))


def memory_shortfall(run: Run, memory: int, device_memory: int) -> str:
    """Return what a machine with so many bytes lacks, as a sentence; "" for nothing."""
    for label, actual, least in (
        ("memory", memory, run.min_memory),
        ("GPU memory", device_memory, run.min_device_memory),
    ):
        if actual < USABLE_SHARE * least:
            return (
                f"the run {run.name} asks for {format_bytes(least)} of {label}; "
                f"this machine has {format_bytes(actual)}"
            )
    return ""


def _memory_bytes(machine: Machine, hardware: reports.HardwareView | None) -> tuple[int, int]:
    """Return RAM and GPU memory: as just sent, as last measured, or as described at enrolment."""
    measurement = getattr(machine, "measured", None)
    if hardware is None and measurement:
        hardware = reports.HardwareView.model_validate(measurement.hardware_view)
    return (hardware.memory, hardware.device_memory) if hardware else (machine.memory_bytes, 0)


def update_addresses(membership: Membership, addresses: list[str], source_address: str) -> None:
    """Store where a machine can be reached, as its newest report says, and where that came from.

    Its peers need this at once, not only when the report is rolled up.
    """
    columns = {"addresses": addresses, "source_address": source_address}
    if {name: getattr(membership, name) for name in columns} != columns:
        Membership.objects.filter(pk=membership.pk).update(**columns)
        membership.source_address = source_address
