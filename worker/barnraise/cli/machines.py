"""Run `barnraise machines …`: what volunteers script for their machines, with a personal token.

Every command prints text for people or, with --json, the site's answer. The token is in
$BARNRAISE_TOKEN; a machine renames itself without one.
"""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from barnraise.cli.console import new_table, out
from barnraise.cli.help_format import HelpfulTyper
from barnraise.cli.site_options import SiteOptions
from barnraise.errors import StateError

ONLINE_SECONDS = 180.0  # the site records at most once a minute that a machine calls

MachineAction = Literal["pause", "resume", "revoke"]
MachineArgument = Annotated[str, typer.Argument(help="A machine's name or id.")]


machines = HelpfulTyper(no_args_is_help=False, help="List and control your machines.")


@machines.callback(invoke_without_command=True)
def list_machines(context: typer.Context, site: SiteOptions) -> None:
    """List your machines, or run one of the commands below."""
    if context.invoked_subcommand:
        return
    site.print_answer(site.fetch_all("machines"), _print_machines)


def _print_machines(answer: list[dict[str, Any]]) -> None:
    table = new_table("machine", "id", "system", "state")
    table.columns[1].no_wrap = True  # other commands take it
    for machine in answer:
        system = machine["system"].partition(" ")[0]  # the kernel's release has no room
        row = (machine["name"], machine["id"], system, _describe_state(machine))
        table.add_row(*map(escape, row))
    out.print(table if answer else "You have no machines here: run `barnraise login` on one.")


@machines.command("do")
def control_machine(action: MachineAction, machine: MachineArgument, site: SiteOptions) -> None:
    """Pause or resume a machine of yours in all its runs, or revoke it for good."""
    answer = site.request("POST", "machines", _find_machine(site, machine), "actions", action)
    site.print_answer(answer, lambda found: out.print(f"{escape(found['name'])}: {action}d"))


@machines.command()
def rename(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="[MACHINE] NAME",
            help="The machine (default: this one), and its new name, which others see.",
        ),
    ],
    site: SiteOptions,
) -> None:
    """Rename a machine of yours. This one needs no token.

    Example: barnraise machines rename attic
    """
    *machine, name = names
    if len(machine) > 1:
        raise StateError(f"one machine and one name, not {len(names)} words: quote what has spaces")
    own_id = site.enrolled_machine
    if not machine and not own_id:
        raise StateError("this machine is not enrolled: name one of yours, and then its new name")
    machine_id = _find_machine(site, machine[0]) if machine else own_id
    answer = site.request(
        "PATCH", "machines", machine_id, body={"name": name}, as_machine=not machine
    )
    site.print_answer(
        answer, lambda found: out.print(f"The machine is now called {escape(found['name'])}.")
    )


def _describe_state(machine: dict[str, Any]) -> str:
    """Describe whether a machine may work, and whether the site has heard from it just now."""
    if machine["revoked"]:
        return "revoked"
    seen = machine["last_seen"] and datetime.fromisoformat(machine["last_seen"])
    is_online = bool(seen) and (datetime.now(UTC) - seen).total_seconds() < ONLINE_SECONDS
    state = "online" if is_online else "offline"
    return f"{state}, paused" if machine["paused"] else state


def _find_machine(site: SiteOptions, machine: str) -> str:
    """Return the id of the machine with this name or id.

    Raises:
        StateError: no machine has it, or several have.
    """
    ids = [m["id"] for m in site.fetch_all("machines") if machine in (m["id"], m["name"])]
    if not ids:
        raise StateError(f"you have no machine called '{machine}': `barnraise machines` lists them")
    if len(ids) > 1:
        raise StateError(f"you have {len(ids)} machines called '{machine}': use the id")
    return ids[0]
