"""Run `barnraise update`: show the version that this machine's site offers, and its line."""

from contextlib import closing
from typing import Annotated

import typer
from packaging.version import InvalidVersion, Version
from rich.markup import escape

from barnraise import __version__
from barnraise.cli.console import out
from barnraise.cli.installation import find_installation, join_command
from barnraise.cli.machine_options import HomeOption, open_state_dir
from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.durable_io import write_atomically
from barnraise.errors import StateError

CONSTRAINTS = "constraints.txt"  # in the state folder: what the installer reads them from


def update(
    check: Annotated[
        bool, typer.Option("--check", help="Only show whether there is another version.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Show the version that this machine's site offers, and the line that installs it.

    The site has signed the version, the digest, which the installer compares, and the versions of
    all dependencies with which its tests pass.
    """
    state_dir = open_state_dir(home)
    url = state_dir.membership.url
    with closing(CoordinatorClient.from_state_dir(state_dir)) as site:
        release = site.fetch_release()
    out.print(f"Installed:  {__version__}")
    out.print(f"The site:   {release.version}  sha256 {release.sha256}", soft_wrap=True)
    if is_newer(__version__, release.version):
        raise StateError(f"{url} offers an older version than this one: keep this one")
    if release.version == __version__:
        out.print("This is the site's version.")
        return
    if check:
        out.print("How to install it: [bold]barnraise update[/]")
        return
    constraints = state_dir.path / CONSTRAINTS if release.constraints else None
    wheel = f"{url}/download/{release.file}#sha256={release.sha256}"
    command = find_installation().build_update_command(wheel, constraints)
    if not command:
        out.print("This is a clone of the sources: update it with git pull.")
        return
    if constraints is not None:
        write_atomically(constraints, "\n".join([*release.constraints, ""]).encode())
    out.print("To update, stop the worker with [bold]barnraise stop[/], and run:\n")
    out.print(f"  {escape(join_command(command))}", soft_wrap=True)


def is_newer(version: str, other: str) -> bool:
    """Return whether a version, like "0.2.0+5.g1" five changes after 0.2.0, is newer. Pure.

    Raises:
        StateError: one is no version, so that nobody knows which is newer.
    """
    try:
        return Version(version) > Version(other)
    except InvalidVersion as error:
        raise StateError(f"the versions cannot be compared: {error}") from None
