"""Endpoints for scripts: a volunteer's machines."""

from typing import Literal
from uuid import UUID

from django.http import HttpRequest

from coordinator.accounts.models import Machine
from coordinator.api import schemas
from coordinator.api.authentication import ApiError, token_auth
from coordinator.api.errors import EndpointRouter
from coordinator.api.lookups import paginate, requesting_user
from coordinator.fleet.machine_state import MachinePause, is_paused

READ = token_auth("machines:read")
WRITE = token_auth("machines:write")
router = EndpointRouter(tags=["Machines"])


@router.get("/machines", auth=READ)
def list_machines(request: HttpRequest, after: UUID | None = None) -> schemas.MachinePage:
    """List your machines, the newest first, fifty per page."""
    machines = requesting_user(request).machines.select_related("pause", "measured").order_by("-pk")
    page, following = paginate(
        machines.filter(pk__lt=after) if after else machines, lambda machine: machine.pk
    )
    return schemas.MachinePage(items=[machine_out(machine) for machine in page], next=following)


@router.get("/machines/{machine}", auth=READ)
def get_machine(request: HttpRequest, machine: UUID) -> schemas.MachineOut:
    """Get one of your machines."""
    return machine_out(get_own_machine(request, machine))


@router.patch("/machines/{machine}", auth=WRITE)
def rename_machine(
    request: HttpRequest, machine: UUID, asked: schemas.MachineIn
) -> schemas.MachineOut:
    """Rename a machine; an empty name resets it to the start of its key."""
    own_machine = get_own_machine(request, machine)
    own_machine.rename(asked.name, actor=requesting_user(request))
    return machine_out(own_machine)


@router.post("/machines/{machine}/actions/{action}", auth=WRITE)
def control_machine(
    request: HttpRequest, machine: UUID, action: Literal["pause", "resume", "revoke"]
) -> schemas.MachineOut:
    """Pause or resume a machine in all its runs, or revoke its key permanently."""
    own_machine = get_own_machine(request, machine)
    actor = requesting_user(request)
    actions = {
        "pause": lambda: MachinePause.start(own_machine, actor=actor),
        "resume": lambda: MachinePause.end(own_machine, actor=actor),
        "revoke": lambda: own_machine.revoke(actor=actor),
    }
    if not actions[action]():
        unpaused = "paused" if action == "pause" else "not paused"
        state = "revoked" if own_machine.revoked else unpaused
        raise ApiError(409, f"{own_machine.name} is {state} already")
    return machine_out(get_own_machine(request, machine))


def get_own_machine(request: HttpRequest, pk: UUID) -> Machine:
    """Return a machine of the token's owner.

    Raises:
        ApiError: There is none with this id.
    """
    machines = requesting_user(request).machines.select_related("pause", "measured")
    machine = machines.filter(pk=pk).first()
    if machine is None:
        raise ApiError(404, "you have no such machine")
    return machine


def machine_out(machine: Machine) -> schemas.MachineOut:
    """Describe a machine for its owner."""
    measured = getattr(machine, "measured", None)
    return schemas.describe(
        schemas.MachineOut,
        machine,
        paused=is_paused(machine),
        revoked=machine.revoked is not None,
        hardware=measured.hardware_view if measured else None,
    )
