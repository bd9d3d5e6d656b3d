"""Reach the site of a run: enrol this machine there, accept an invitation, look the run up."""

import os
import platform
import time
from contextlib import closing

import psutil
from rich.markup import escape

from barnraise.cli.addresses import RunAddress
from barnraise.cli.browser import open_page
from barnraise.cli.console import errors, out
from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.coordinator_client.failover import FailoverClient
from barnraise.errors import (
    CoordinatorError,
    CoordinatorUnreachableError,
    RunEndedError,
    StateError,
)
from barnraise.planning.hardware import cpu_name, printable_name
from barnraise.protocol.coordinator_messages import EnrolmentStatus, MachineDescription, RunView
from barnraise.protocol.enums import RunStatus
from barnraise.state_dir import SiteMembership, StateDir


def enrol_machine(state_dir: StateDir, site: str, name: str = "") -> SiteMembership:
    """Show a code, wait until a person approves it in the browser, and save the enrolment.

    The site's address has no path. The machine is called `name` there, or by its host name.

    Raises:
        CoordinatorError: the site does not answer, or the code was refused or expired.
    """
    coordinator = CoordinatorClient(site, state_dir.identity)
    mirror = coordinator.pin_mirror()
    enrolment = coordinator.request_enrolment(describe_machine(name))
    page = f"{coordinator.url}/machines/enrol/{enrolment.code}/"
    out.print(
        f"Approve this machine on [bold]{escape(mirror.name)}[/] in your browser:\n\n"
        f"  {escape(page)}\n\n  code  [bold]{enrolment.code}[/]\n"
        f"  key   {state_dir.identity.key}\n",
        soft_wrap=True,
    )
    open_page(page)
    status = _fetch_status(coordinator, enrolment.code)
    while status.status == "pending":
        time.sleep(enrolment.poll_every)
        status = _fetch_status(coordinator, enrolment.code)
    if status.status != "approved" or status.machine is None:
        raise CoordinatorError(
            f"the code was {status.status}: run `barnraise login` again for a new one"
        )
    membership = SiteMembership(
        url=coordinator.url, mirror=mirror, machine=status.machine, person=status.person
    )
    state_dir.save_membership(membership)
    shown_name = status.name
    if name and shown_name and shown_name != name:  # enrolled before, or taken by another machine
        shown_name = _rename_machine(state_dir, membership, name)
    suffix = f" and is called {escape(shown_name)} there" if shown_name else ""
    out.print(f"This machine now works for {escape(status.person) or 'you'}{suffix}.")
    return membership


def _rename_machine(state_dir: StateDir, membership: SiteMembership, name: str) -> str:
    """Rename this machine on the site, and return what the site calls it."""
    with closing(CoordinatorClient.from_state_dir(state_dir)) as site:
        answer = site.request_json("PATCH", "machines", membership.machine, body={"name": name})
    return str(answer["name"])


def _fetch_status(coordinator: CoordinatorClient, code: str) -> EnrolmentStatus:
    """Fetch the decision on a code; it is pending while the coordinator does not answer."""
    try:
        return coordinator.fetch_enrolment(code)
    except CoordinatorUnreachableError as error:
        errors.print_sentence(f"{escape(str(error))}; still waiting")
        return EnrolmentStatus(status="pending")


def describe_machine(name: str) -> MachineDescription:
    """Describe this machine for its enrolment; it is called `name`, or by its host name."""
    return MachineDescription(
        hostname=(name or platform.node())[:100],
        system=f"{platform.system()} {platform.release()}"[:100],
        processor=printable_name(cpu_name()),
        cores=os.cpu_count() or 0,
        memory_bytes=psutil.virtual_memory().total,
        accelerator=_accelerator_name()[:100],
    )


def _accelerator_name() -> str:
    """Return the GPU's name, or "" without one; print why a GPU that is here cannot be used."""
    from barnraise.swap.device import choose_device, device_label

    choice = choose_device()
    if choice.note:
        errors.print_sentence(f"[yellow]{escape(choice.note)}.[/]")
    return device_label(choice.name)


def open_site(state_dir: StateDir, run: RunAddress) -> SiteMembership:
    """Return this machine's enrolment at the site of a run, and accept the run's invitation.

    A machine that is enrolled nowhere enrols at the site that the run's address names.

    Raises:
        StateError: the machine is not enrolled and no site is named, or it is enrolled elsewhere.
        CoordinatorError: the site refused the enrolment or the invitation.
    """
    if run.site and not state_dir.is_enrolled:
        enrol_machine(state_dir, run.site)
    membership = state_dir.membership
    if not run.site or (run.site == membership.url and not run.invitation):
        return membership
    # Any mirror of the site that enrolled this machine knows it.
    with closing(CoordinatorClient(run.site, state_dir.identity)) as site:
        if site.pin_mirror().key not in FailoverClient.from_state_dir(state_dir).keys:
            raise StateError(
                f"this machine is enrolled at {membership.url}, and that run is at {run.site}: "
                "name a folder for a second enrolment with --home FOLDER, or leave the first "
                "site with `barnraise logout`"
            )
        if run.invitation:
            site.accept_invitation(run.invitation)
    return membership


def find_run(state_dir: StateDir, name: str) -> RunView | None:
    """Look a run up, by its id or its name in addresses, before anything that takes time.

    Returns:
        None while no site answers.

    Raises:
        CoordinatorError: there is no such run.
    """
    with closing(FailoverClient.from_state_dir(state_dir)) as coordinator:
        try:
            return coordinator.fetch_run(name)
        except CoordinatorUnreachableError:
            return None


def check_trainable(run: RunView) -> None:
    """Refuse a run that is over.

    Raises:
        RunEndedError: it is finished or cancelled.
    """
    if run.status is RunStatus.FINISHED:
        name = run.slug or run.id
        raise RunEndedError(
            f"the run '{run.name}' is finished: there is nothing to train. "
            f"`barnraise fetch {name} FOLDER` downloads its model; on a machine that trained in "
            f"it, `barnraise export {name} FOLDER` writes it"
        )
    if run.status is RunStatus.CANCELLED:
        raise RunEndedError(
            f"the run '{run.name}' was cancelled by its owner: there is nothing to train. "
            "`barnraise runs` lists the others"
        )
