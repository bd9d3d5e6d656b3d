"""Run `barnraise login` and `barnraise logout`: enrol this machine at a site; forget the site."""

from typing import Annotated

import typer
from rich.markup import escape

from barnraise.cli.addresses import parse_site_address
from barnraise.cli.console import out
from barnraise.cli.machine_options import HomeOption, open_state_dir
from barnraise.cli.site_access import enrol_machine
from barnraise.training.local_control import refuse_other_worker


def login(
    url: Annotated[str, typer.Argument(help="The site's address, as in the browser.")],
    name: Annotated[
        str, typer.Option(help="This machine's name on the site (default: its host name).")
    ] = "",
    home: HomeOption = None,
) -> None:
    """Enrol this machine at a site: it shows a code that you approve in the browser.

    Example: barnraise login https://train.example.org
    """
    state_dir = open_state_dir(home)
    if state_dir.is_enrolled:
        out.print_sentence(
            f"This machine is enrolled at {escape(state_dir.membership.url)} already. The code "
            "below enrols the same key again; Ctrl-C leaves everything as it is."
        )
    enrol_machine(state_dir, parse_site_address(url), name)
    out.print("Next: [bold]barnraise join RUN[/]")


def logout(home: HomeOption = None) -> None:
    """Forget the site where this machine is enrolled. Its key and its runs stay on this machine.

    The machine stays in your list on the site, where you can revoke it.
    """
    state_dir = open_state_dir(home)
    membership = state_dir.membership
    refuse_other_worker(state_dir)
    state_dir.remove_membership()
    out.print_sentence(
        f"This machine no longer works for {membership.url}. To remove it there as well:\n"
        f"{membership.url}/machines/{membership.machine}/"
    )
