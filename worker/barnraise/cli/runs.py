"""`barnraise runs …` and `barnraise machines …`: what organisers and volunteers script, by a personal token.

Every command prints a line for people or, with --json, what the site answered. The token is in $BARNRAISE_TOKEN.
"""

import contextlib
import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from barnraise.cli.plan import HomeOption, JsonOption
from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.coordinator_client.token_client import TokenClient
from barnraise.errors import StateError
from barnraise.formats import parse_bytes
from barnraise.protocol.verdicts import Verdict
from barnraise.state_dir import StateDir

runs = typer.Typer(
    no_args_is_help=False, help="The runs there are, and what an organiser does with them."
)
machines = typer.Typer(no_args_is_help=False, help="Your machines, as the site knows them.")
out = Console(highlight=False)

SiteOption = Annotated[
    str,
    typer.Option(
        "--site",
        envvar="BARNRAISE_SITE",
        help="The site (default: where this machine is enrolled).",
    ),
]
RunArgument = Annotated[str, typer.Argument(help="The run's name in its address, or its id.")]
MachineArgument = Annotated[str, typer.Argument(help="A machine's name or id.")]
PresetOption = Annotated[str, typer.Option(help="A model, like gpt2-124m.")]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Any field of the rules, like recipe.learning_rate=3e-4.",
    ),
]
TokensOption = Annotated[
    str, typer.Option(help="Training ends after this many tokens, all machines together.")
]


class Do(StrEnum):
    LAUNCH = "launch"
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    ARCHIVE = "archive"
    UNARCHIVE = "unarchive"


class Move(StrEnum):
    PAUSE = "pause"
    RESUME = "resume"
    REVOKE = "revoke"


# ---- runs ----------------------------------------------------------------------------------------------------------


@runs.callback(invoke_without_command=True)
def list_runs(context: typer.Context, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the runs this machine could join."""
    if context.invoked_subcommand:
        return
    place = StateDir(home or StateDir.default_path())
    coordinator = CoordinatorClient.from_membership(place.membership, place.identity)
    found, after = [], None
    while True:
        page = coordinator.fetch_runs(after)
        found += page.runs
        if (after := page.next) is None:
            break
    if as_json:
        print_json(
            [{"id": r.id, "slug": r.slug, "name": r.name, "status": r.status} for r in found]
        )
        return
    table = Table("run", "name", "status", box=None, pad_edge=False)
    for run in found:
        table.add_row(run.slug or run.id, run.name, run.status)
    out.print(table if found else "There are no runs yet.")


@runs.command()
def create(
    name: Annotated[str, typer.Option(help="Others see it.")],
    preset: PresetOption = "gpt-nano",
    tokens: TokensOption = "",
    fields: SetOption = [],  # noqa: B006  (typer's way)
    source: Annotated[str, typer.Option(help="stdlib, huggingface, urls or files.")] = "",
    place: Annotated[
        list[str], typer.Option(help="A dataset as owner/name, or an address; repeatable.")
    ] = [],  # noqa: B006
    access: Annotated[str, typer.Option(help="Who may join: anyone or invitation.")] = "",
    least_memory: Annotated[str, typer.Option(help="Minimum RAM, e.g. 8GB.")] = "",
    least_device_memory: Annotated[str, typer.Option(help="Minimum GPU memory, e.g. 8GB.")] = "",
    notes: Annotated[Path | None, typer.Option(help="A file of notes in Markdown.")] = None,
    quorum: Annotated[int, typer.Option(help="Machines to wait for before training starts.")] = 1,
    launch: Annotated[bool, typer.Option("--launch", help="Launch it too.")] = False,
    site: SiteOption = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a run: a draft or, with --launch, one that waits for its text and machines."""
    typed = spec_fields(fields, tokens, source, place)
    asked = {
        "name": name, "preset": preset, "fields": typed, "quorum": quorum, "launch": launch,
        "terms": terms(access, least_memory, least_device_memory, notes),
    }  # fmt: skip
    with open_client(home, site) as client:
        print_run(client.request("POST", "runs", body=asked), as_json)


@runs.command()
def show(
    run: RunArgument, site: SiteOption = "", home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """Show a run: its rules, its terms and its progress."""
    with open_client(home, site) as client:
        print_run(client.request("GET", "runs", run, "summary"), as_json)


@runs.command("do")
def control(
    action: Do,
    run: RunArgument,
    site: SiteOption = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Launch, pause, resume, cancel, archive or unarchive a run of yours."""
    with open_client(home, site) as client:
        print_run(client.request("POST", "runs", run, "actions", action), as_json)


@runs.command("copy")
def copied(
    run: RunArgument,
    name: Annotated[str, typer.Option(help="Name of the copy.")] = "",
    checkpoint: Annotated[str, typer.Option(help="Start from the weights with this digest.")] = "",
    site: SiteOption = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy another run's rules into a draft of yours."""
    with open_client(home, site) as client:
        print_run(
            client.request(
                "POST", "runs", run, "copies", body={"name": name, "checkpoint": checkpoint}
            ),
            as_json,
        )


@runs.command("terms")
def change_terms(
    run: RunArgument,
    access: Annotated[str, typer.Option(help="Who may join: anyone or invitation.")] = "",
    least_memory: Annotated[str, typer.Option(help="Minimum RAM, e.g. 8GB.")] = "",
    least_device_memory: Annotated[str, typer.Option(help="Minimum GPU memory, e.g. 8GB.")] = "",
    notes: Annotated[Path | None, typer.Option(help="A file of notes in Markdown.")] = None,
    site: SiteOption = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change who may join, with what, and the notes. Options left out keep their value."""
    with open_client(home, site) as client:
        asked = terms(access, least_memory, least_device_memory, notes)
        print_run(client.request("PATCH", "runs", run, "terms", body=asked), as_json)


@runs.command()
def invite(
    run: RunArgument,
    note: Annotated[str, typer.Option(help="Whom it is for; only you see it.")] = "",
    site: SiteOption = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a link that lets people join."""
    with open_client(home, site) as client:
        link = client.request("POST", "runs", run, "invitations", body={"note": note})
    print_json(link) if as_json else out.print(link["url"], soft_wrap=True)


@runs.command()
def checkpoints(
    run: RunArgument, site: SiteOption = "", home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """List the weights that machines hold, and which are confirmed."""
    with open_client(home, site) as client:
        found = client.request("GET", "runs", run, "checkpoints")
    if as_json:
        print_json(found)
        return
    table = Table("tokens", "digest", "machines", "confirmed", box=None, pad_edge=False)
    for each in found:
        state = "DISPUTED" if each["disputed"] else "yes" if each["confirmed"] else "no"
        table.add_row(f"{each['tokens']:,}", each["digest"], str(each["machines"]), state)
    out.print(table if found else "No machine has announced one yet.")


@runs.command()
def verdict(
    run: RunArgument,
    machine: Annotated[
        str, typer.Argument(help="Whose updates: a machine's name, id or key, or KEY.LIFE.")
    ] = "",
    first: Annotated[
        int | None, typer.Option("--from", min=1, help="From this one on all of them come out.")
    ] = None,
    update: Annotated[
        list[str] | None, typer.Option(help="A single one, NUMBER or NUMBER:TOKENS; repeatable.")
    ] = None,
    reason: Annotated[str, typer.Option(help="For everybody to read.")] = "",
    site: SiteOption = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have the site take a machine's updates out of a run of yours, on every machine. Without a machine: what was
    taken out so far. (`barnraise verdict` does it without the site, on the machine that prepared the text.)"""
    with open_client(home, site) as client:
        if machine:
            asked = {
                "author": machine,
                "first": first,
                "updates": single_updates(update or []),
                "reason": reason,
            }
            found = [client.request("POST", "runs", run, "verdicts", body=asked)]
        else:
            found = client.request("GET", "runs", run, "verdicts")
    if as_json:
        print_json(found[0] if machine else found)
        return
    table = Table("given", "of", "out", "because", box=None, pad_edge=False)
    for each in found:
        said = Verdict.model_validate_json(each["body"])
        for author in {**said.after, **said.updates}:
            cut = [f"from {said.after[author] + 1} on"] if author in said.after else []
            out_of_it = ", ".join([*cut, *map(str, said.updates.get(author, {}))])
            table.add_row(
                each["given"][:16], f"{author[:8]}….{author[-16:]}", out_of_it, escape(said.reason)
            )
    out.print(table if found else "Nothing was taken out of it.")


@runs.command()
def members(
    run: RunArgument, site: SiteOption = "", home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """List the machines in a run."""
    with open_client(home, site) as client:
        found = client.fetch_all("runs", run, "machines")
    if as_json:
        print_json(found)
        return
    table = Table("machine", "of", "doing", "tokens", "tokens/s", box=None, pad_edge=False)
    for each in found:
        doing, rate = (each["activity"], f"{each['rate']:,.0f}") if each["alive"] else ("gone", "")
        table.add_row(
            escape(each["name"]), escape(each["person"]), doing, f"{each['tokens']:,}", rate
        )
    out.print(table if found else "No machine has joined yet.")


@runs.command()
def estimate(
    preset: PresetOption = "gpt-nano",
    tokens: TokensOption = "",
    fields: SetOption = [],  # noqa: B006
    volunteers: Annotated[
        int, typer.Option(min=1, max=10_000, help="How many such machines.")
    ] = 10,
    site: SiteOption = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """What a run would take on typical machines, and how long with so many of them."""
    asked = {
        "preset": preset,
        "fields": spec_fields(fields, tokens, "", []),
        "volunteers": volunteers,
    }
    with open_client(home, site) as client:
        found = client.request("POST", "estimates", body=asked)
    if as_json:
        print_json(found)
        return
    lines = [f"{volunteers} of them, {line} Mb/s" for line in (20, 100)]
    table = Table("machine", "a step", "tokens/s", *lines, box=None, pad_edge=False)
    for need in found["needs"]:
        if need["refusal"]:
            table.add_row(need["machine"], escape(need["refusal"]))
            continue
        days = [f"{pace['seconds'] / 86_400:,.2f} days" for pace in need["paces"]]
        table.add_row(
            need["machine"],
            f"{need['step_seconds']:.2f} s",
            f"{need['tokens_per_second']:,.0f}",
            *days,
        )
    out.print(table)


# ---- machines ------------------------------------------------------------------------------------------------------


@machines.callback(invoke_without_command=True)
def list_machines(
    context: typer.Context,
    site: SiteOption = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """List your machines."""
    if context.invoked_subcommand:
        return
    with open_client(home, site) as client:
        found = client.fetch_all("machines")
    if as_json:
        print_json(found)
        return
    table = Table("machine", "id", "system", "state", box=None, pad_edge=False)
    for each in found:
        state = "revoked" if each["revoked"] else "paused" if each["paused"] else ""
        table.add_row(escape(each["name"]), each["id"], escape(each["system"]), state)
    out.print(table if found else "You have no machines here: run `barnraise login` on one.")


@machines.command("do")
def move(
    action: Move,
    machine: MachineArgument,
    site: SiteOption = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pause or resume a machine of yours in all its runs, or revoke it for good."""
    with open_client(home, site) as client:
        found = client.request("POST", "machines", find_machine(client, machine), "actions", action)
    print_json(found) if as_json else out.print(f"{escape(found['name'])}: {action}d")


@machines.command()
def rename(
    machine: MachineArgument,
    name: Annotated[str, typer.Argument(help="What others see.")],
    site: SiteOption = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rename a machine of yours."""
    with open_client(home, site) as client:
        found = client.request(
            "PATCH", "machines", find_machine(client, machine), body={"name": name}
        )
    print_json(found) if as_json else out.print(f"It is called {escape(found['name'])} now.")


# ---- what they share -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_client(home: Path | None, site: str) -> Iterator[TokenClient]:
    client = TokenClient.from_environment(StateDir(home or StateDir.default_path()), site)
    try:
        yield client
    finally:
        client.close()


def find_machine(client: TokenClient, machine: str) -> str:
    """The id of a machine called so. Raises StateError."""
    found = [
        each["id"] for each in client.fetch_all("machines") if machine in (each["id"], each["name"])
    ]
    if len(found) != 1:
        raise StateError(
            f"you have {len(found) or 'no'} machine{'s' * (len(found) > 1)} called '{machine}': give its id"
        )
    return found[0]


def spec_fields(fields: list[str], tokens: str, source: str, places: list[str]) -> dict[str, Any]:
    """Raises StateError."""
    typed: dict[str, Any] = {}
    for field in fields:
        key, equals, value = field.partition("=")
        if not equals:
            raise StateError(f"--set takes FIELD=VALUE, not '{field}'")
        typed[key.strip()] = value.strip()
    if places and not source:
        source = "urls" if "//" in places[0] else "huggingface"
    said = {"recipe.token_budget": tokens, "text.source": source, "text.places": places}
    return typed | {name: value for name, value in said.items() if value}


def single_updates(said: list[str]) -> dict[str, int]:
    """Number → tokens, 0 where they are not said. Raises StateError."""
    found = {}
    for each in said:
        number, _, tokens = each.partition(":")
        if not number.isdecimal() or not (tokens or "0").isdecimal():
            raise StateError(f"--update takes NUMBER or NUMBER:TOKENS, not '{each}'")
        found[number] = int(tokens or 0)
    return found


def terms(access: str, memory: str, device_memory: str, notes: Path | None) -> dict[str, Any]:
    said: dict[str, Any] = {"access": access} if access else {}
    if memory:
        said["least_memory"] = parse_bytes(memory)
    if device_memory:
        said["least_device_memory"] = parse_bytes(device_memory)
    return said | ({"notes": notes.read_text("utf-8")} if notes else {})


def print_json(answer: Any) -> None:
    print(json.dumps(answer))


def print_run(run: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(run)
        return
    share = run["tokens"] / max(1, run["token_budget"])
    state = "launching" if run["status"] == "draft" and run["launch_requested"] else run["status"]
    out.print(
        f"[bold]{escape(run['slug'])}[/]  {state}  {run['parameters']:,} parameters  {share:.0%} of its tokens"
    )
    out.print(run["url"], soft_wrap=True)
