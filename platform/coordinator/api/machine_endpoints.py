"""Endpoints for scripts, and for a machine itself: a volunteer's machines."""

from typing import Literal
from uuid import UUID

from django.http import HttpRequest

from coordinator.accounts.models import Machine
from coordinator.api import schemas
from coordinator.api.authentication import ApiError, machine_or_token_auth, token_auth
from coordinator.api.errors import EndpointRouter
from coordinator.api.lookups import get_credential, paginate, requesting_user
from coordinator.fleet.machine_state import MachinePause, is_paused
from coordinator.ops.read_only import SAFE_METHODS
from coordinator.ops.write_limits import REFUSAL, count_write

READ = token_auth("machines:read")
READ_BY_MACHINE = machine_or_token_auth("machines:read")
WRITE = machine_or_token_auth("machines:write")
router = EndpointRouter(tags=["Machines"])


@router.get("/machines", auth=READ)
def list_machines(request: HttpRequest, after: UUID | None = None) -> schemas.MachinePage:
    """List your machines, the newest first, fifty per page."""
    machines = requesting_user(request).machines.select_related("pause", "measured").order_by("-pk")
    page, following = paginate(
        machines.filter(pk__lt=after) if after else machines, lambda machine: machine.pk
    )
    return schemas.MachinePage(items=[machine_out(machine) for machine in page], next=following)


@router.get("/machines/{machine}", auth=READ_BY_MACHINE)
def get_machine(request: HttpRequest, machine: UUID) -> schemas.MachineOut:
    """Get one of your machines; a machine may get itself."""
    return machine_out(get_own_machine(request, machine))


@router.patch("/machines/{machine}", auth=WRITE)
def rename_machine(
    request: HttpRequest, machine: UUID, asked: schemas.MachineIn
) -> schemas.MachineOut:
    """Rename a machine; an empty name resets it to the start of its key.

    A machine may rename itself. If another one of its owner has the name, a number follows it.
    """
    own_machine = get_own_machine(request, machine)
    own_machine.rename(asked.name, actor=own_machine.owner)
    return machine_out(own_machine)


@router.post("/machines/{machine}/actions/{action}", auth=WRITE)
def control_machine(
    request: HttpRequest, machine: UUID, action: Literal["pause", "resume", "revoke"]
) -> schemas.MachineOut:
    """Pause or resume a machine in all its runs, or revoke its key permanently.

    A machine may revoke itself: somebody who removes the worker revokes its key as well.
    """
    own_machine = get_own_machine(request, machine)
    if action != "revoke" and isinstance(get_credential(request), Machine):
        raise ApiError(403, "use a token: a machine pauses by `barnraise pause`, without the site")
    actor = own_machine.owner
    actions = {
        "pause": lambda: MachinePause.start(own_machine, actor=actor),
        "resume": lambda: MachinePause.end(own_machine, actor=actor),
        "revoke": lambda: own_machine.revoke(actor=actor),
    }
    if not actions[action]():
        unpaused = "paused" if action == "pause" else "not paused"
        state = "revoked" if own_machine.revoked else unpaused
        raise ApiError(409, f"{own_machine.name} is {state} already")
    own_machine.refresh_from_db()
    return machine_out(own_machine)


def get_own_machine(request: HttpRequest, pk: UUID) -> Machine:
    """Return a machine of the token's owner, or the one that signed the request.

    Raises:
        ApiError: There is none with this id, a machine asks for another one, or it has changed
            itself too often.
    """
    credential = get_credential(request)
    owner = credential.owner if isinstance(credential, Machine) else requesting_user(request)
    if isinstance(credential, Machine) and credential.pk != pk:
        raise ApiError(403, "a machine sees and changes itself alone: use a token for your others")
    is_write = request.method not in SAFE_METHODS and isinstance(credential, Machine)
    if is_write and not count_write(owner.pk):
        raise ApiError(429, REFUSAL)
    machine = owner.machines.select_related("pause", "measured").filter(pk=pk).first()
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
