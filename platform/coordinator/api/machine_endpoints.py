"""What a volunteer's scripts do with their machines."""

from typing import Literal
from uuid import UUID

from django.http import HttpRequest

from coordinator.accounts.models import Machine
from coordinator.api import schemas
from coordinator.api.authentication import ApiError, token_auth
from coordinator.api.ninja_api import api, responses
from coordinator.api.run_endpoints import paginate, requesting_user
from coordinator.fleet.machine_state import MachinePause, is_paused

READ, WRITE = token_auth("machines:read"), token_auth("machines:write")
FIELDS = (
    "id",
    "key",
    "name",
    "system",
    "cores",
    "memory_bytes",
    "accelerator",
    "enrolled",
    "last_seen",
)


@api.get("/machines", response=responses(schemas.MachinePage), auth=READ, tags=["Machines"])
def list_machines(request: HttpRequest, after: UUID | None = None):
    """Yours, newest first, fifty a page."""
    found = requesting_user(request).machines.select_related("pause", "measured").order_by("-pk")
    page, following = paginate(
        found.filter(pk__lt=after) if after else found, lambda machine: machine.pk
    )
    return schemas.MachinePage(items=[machine_out(machine) for machine in page], next=following)


@api.get(
    "/machines/{machine}", response=responses(schemas.MachineOut), auth=READ, tags=["Machines"]
)
def get_machine(request: HttpRequest, machine: UUID):
    """One of yours."""
    return machine_out(get_own_machine(request, machine))


@api.patch(
    "/machines/{machine}", response=responses(schemas.MachineOut), auth=WRITE, tags=["Machines"]
)
def rename_machine(request: HttpRequest, machine: UUID, asked: schemas.MachineIn):
    """Another name; an empty one goes back to the start of its key."""
    found = get_own_machine(request, machine)
    found.rename(asked.name, actor=requesting_user(request))
    return machine_out(found)


@api.post(
    "/machines/{machine}/actions/{action}",
    response=responses(schemas.MachineOut),
    auth=WRITE,
    tags=["Machines"],
)
def control_machine(
    request: HttpRequest, machine: UUID, action: Literal["pause", "resume", "revoke"]
):
    """Pause or resume it in all its runs, or revoke its key for good."""
    found, actor = get_own_machine(request, machine), requesting_user(request)
    done = {
        "pause": lambda: MachinePause.start(found, actor=actor),
        "resume": lambda: MachinePause.end(found, actor=actor),
        "revoke": lambda: found.revoke(actor=actor),
    }[action]()
    if not done:
        state = "revoked" if found.revoked else "paused" if action == "pause" else "not paused"
        raise ApiError(409, f"{found.name} is {state} already")
    return machine_out(get_own_machine(request, machine))


def get_own_machine(request: HttpRequest, pk: UUID) -> Machine:
    """Raises Refusal."""
    found = (
        requesting_user(request).machines.select_related("pause", "measured").filter(pk=pk).first()
    )
    if found is None:
        raise ApiError(404, "you have no such machine")
    return found


def machine_out(machine: Machine) -> schemas.MachineOut:
    measured = getattr(machine, "measured", None)
    return schemas.MachineOut(
        **{field: getattr(machine, field) for field in FIELDS},
        paused=is_paused(machine),
        revoked=machine.revoked is not None,
        hardware=measured.hardware_view if measured else None,
    )
