"""Run `barnraise update`: install the version that this machine's site offers."""

import re
import subprocess
import sys
from contextlib import closing
from typing import Annotated

import typer
from rich.markup import escape

from barnraise import __version__
from barnraise.cli.console import out
from barnraise.cli.installation import find_installation, join_command
from barnraise.cli.machine_options import HomeOption, open_state_dir
from barnraise.coordinator_client.machine_requests import MachineRequests
from barnraise.durable_io import write_atomically
from barnraise.errors import StateError
from barnraise.training.local_control import refuse_other_worker

CONSTRAINTS = "constraints.txt"  # in the state folder: what the installer reads them from
VERSION = re.compile(r"([0-9]+(?:\.[0-9]+)*)(?:\+([0-9]+)(?:\..*)?)?")


def update(
    check: Annotated[
        bool, typer.Option("--check", help="Only show whether there is another version.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Install the version that this machine's site offers, after asking.

    The site has signed the version, the digest, which the installer compares, and the versions of
    all dependencies with which its tests pass.
    """
    state_dir = open_state_dir(home)
    with closing(MachineRequests(state_dir)) as site:
        release = site.fetch_release()
    installed, offered = parse_version(__version__), parse_version(release.version)
    wheel = f"{state_dir.membership.url}/download/{release.file}#sha256={release.sha256}"
    constraints = state_dir.path / CONSTRAINTS if release.constraints else None
    command = find_installation().build_update_command(wheel, constraints)
    out.print(f"Installed:  {__version__}")
    out.print(f"The site:   {release.version}  sha256 {release.sha256}", soft_wrap=True)
    if offered < installed:
        raise StateError(
            f"{state_dir.membership.url} offers {release.version}, which is older than "
            f"{__version__} here: nothing is installed"
        )
    if offered == installed:
        out.print("This is the site's version.")
        return
    if not command:
        out.print("This is a clone of the sources: update it with git pull.")
        return
    if constraints is not None:
        write_atomically(constraints, "\n".join([*release.constraints, ""]).encode())
    out.print(f"To update:\n\n  {escape(join_command(command))}\n", soft_wrap=True)
    if check:
        return
    refuse_other_worker(state_dir)
    if sys.platform == "win32":
        out.print("Windows replaces no program that runs: copy this line into a terminal.")
        return
    typer.confirm("Run it?", default=True, abort=True)
    _install(command)
    out.print("Updated. Go on with: [bold]barnraise join RUN[/]")


def _install(command: list[str]) -> None:
    try:
        code = subprocess.run(command, check=False).returncode
    except OSError as error:
        raise StateError(f"{command[0]} cannot be started ({error.strerror})") from None
    if code:
        raise StateError(f"{command[0]} ended with exit code {code}: see its messages above")


def parse_version(text: str) -> tuple[list[int], int]:
    """Return what is compared of a version, like "0.2.0", or "0.2.0+5.g1" five changes later. Pure.

    Raises:
        StateError: it is no such version, so that nobody knows which is newer.
    """
    parts = VERSION.fullmatch(text)
    if parts is None:
        raise StateError(f"'{text}' is no version of barnraise that can be compared")
    return [int(number) for number in parts[1].split(".")], int(parts[2] or 0)
