"""Run `barnraise login`: enrol this machine at a site."""

import os
import platform
import time
from typing import Annotated

import psutil
import typer
from rich.markup import escape

from barnraise.cli.addresses import parse_site_address
from barnraise.cli.console import errors, out
from barnraise.cli.machine_options import HomeOption, open_state_dir
from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.errors import CoordinatorError, CoordinatorUnreachableError
from barnraise.protocol.coordinator_messages import EnrolmentStatus, MachineDescription
from barnraise.state_dir import SiteMembership


def login(
    url: Annotated[str, typer.Argument(help="The site's address, as in the browser.")],
    name: Annotated[
        str, typer.Option(help="This machine's name on the site (default: its host name).")
    ] = "",
    home: HomeOption = None,
) -> None:
    """Enrol this machine at a site: it shows a code that you approve in the browser."""
    state_dir = open_state_dir(home)
    coordinator = CoordinatorClient(parse_site_address(url), state_dir.identity)
    mirror = coordinator.pin_mirror()
    enrolment = coordinator.request_enrolment(describe_machine(name))
    out.print(
        f"Approve this machine on [bold]{escape(mirror.name)}[/]:\n\n"
        f"  {enrolment.url}\n\n  code  [bold]{enrolment.code}[/]\n"
        f"  key   {state_dir.identity.key}\n"
    )
    status = fetch_status(coordinator, enrolment.code)
    while status.status == "pending":
        time.sleep(enrolment.poll_every)
        status = fetch_status(coordinator, enrolment.code)
    if status.status != "approved" or status.machine is None:
        raise CoordinatorError(
            f"the code was {status.status}: run `barnraise login` again for a new one"
        )
    state_dir.save_membership(
        SiteMembership(
            url=coordinator.url, mirror=mirror, machine=status.machine, person=status.person
        )
    )
    owner = escape(status.person) or "you"
    out.print(f"This machine now works for {owner}. Next: [bold]barnraise join RUN[/]")


def fetch_status(coordinator: CoordinatorClient, code: str) -> EnrolmentStatus:
    """Fetch the decision on a code; it is pending while the coordinator does not answer."""
    try:
        return coordinator.fetch_enrolment(code)
    except CoordinatorUnreachableError as error:
        errors.print(f"{escape(str(error))}; still waiting", soft_wrap=True)
        return EnrolmentStatus(status="pending")


def describe_machine(name: str) -> MachineDescription:
    """Describe this machine for its enrolment; it is called `name`, or by its host name."""
    return MachineDescription(
        hostname=(name or platform.node())[:100],
        system=f"{platform.system()} {platform.release()}"[:100],
        processor=(platform.processor() or platform.machine())[:100],
        cores=os.cpu_count() or 0,
        memory_bytes=psutil.virtual_memory().total,
        accelerator=accelerator_name()[:100],
    )


def accelerator_name() -> str:
    """Return the GPU's name, or "" without one."""
    from barnraise.swap.device import choose_device, device_label

    return device_label(choose_device().name)
