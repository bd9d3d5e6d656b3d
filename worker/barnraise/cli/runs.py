"""Run `barnraise runs …`: what organisers script, with a personal token.

Every command prints text for people or, with --json, the site's answer. The token is in
$BARNRAISE_TOKEN.
"""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from barnraise.cli.addresses import RunAddress, RunArgument
from barnraise.cli.chosen_runs import fetch_all_runs
from barnraise.cli.console import new_table, out, print_json
from barnraise.cli.help_format import HelpfulTyper
from barnraise.cli.machine_options import HomeOption, JsonOption, open_state_dir
from barnraise.cli.option_groups import option
from barnraise.cli.site_options import SiteOptions
from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.errors import StateError
from barnraise.formats import format_duration, format_share, parse_bytes
from barnraise.planning.lines import LINES
from barnraise.protocol.coordinator_messages import RunSummary
from barnraise.protocol.verdicts import Verdict

RunAction = Literal["launch", "pause", "resume", "finish", "cancel", "archive", "unarchive"]


@dataclass(frozen=True)
class RulesOptions:
    """The rules of a run: a preset, and fields that differ from it."""

    preset: str = option("gpt-nano", "A model, like gpt2-124m.")
    tokens: str = option("", "Training ends after this many tokens, all machines together.")
    fields: list[str] | None = option(
        None,
        "A field of the rules, like recipe.learning_rate=3e-4; repeatable.",
        "--set",
        metavar="FIELD=VALUE",
    )

    def typed_fields(self) -> dict[str, Any]:
        """Return the fields by name, with their values as text.

        Raises:
            StateError: --set has no FIELD=VALUE.
        """
        fields: dict[str, Any] = {}
        for assignment in self.fields or []:
            name, equals, value = assignment.partition("=")
            if not equals:
                raise StateError(f"--set takes FIELD=VALUE, not '{assignment}'")
            fields[name.strip()] = value.strip()
        if self.tokens:
            fields["recipe.token_budget"] = self.tokens
        return fields


@dataclass(frozen=True)
class TextOptions:
    """The source of a run's text."""

    source: str = option("", "Source of the text: stdlib, huggingface, urls or files.")
    place: list[str] | None = option(None, "A dataset as hf:owner/name, or an address; repeatable.")

    def typed_fields(self) -> dict[str, Any]:
        """Return the fields of the rules; a place alone implies its source."""
        source = self.source
        if self.place and not source:
            source = "urls" if "//" in self.place[0] else "huggingface"
        fields = {"text.source": source, "text.places": self.place}
        return {name: value for name, value in fields.items() if value}


@dataclass(frozen=True)
class TermsOptions:
    """The terms on which machines may join a run."""

    access: str = option("", "Who may join: anyone or invitation.")
    min_memory: str = option("", "Minimum RAM, e.g. 8GB.")
    min_device_memory: str = option("", "Minimum GPU memory, e.g. 8GB.")
    notes: Path | None = option(None, "A file of notes in Markdown.")

    def to_request(self) -> dict[str, Any]:
        """Return the terms that were given, as the site's API takes them."""
        terms: dict[str, Any] = {}
        if self.access:
            terms["access"] = self.access
        if self.min_memory:
            terms["min_memory"] = parse_bytes(self.min_memory)
        if self.min_device_memory:
            terms["min_device_memory"] = parse_bytes(self.min_device_memory)
        if self.notes:
            terms["notes"] = self.notes.read_text("utf-8")
        return terms


@dataclass(frozen=True)
class LaunchOptions:
    """When a new run starts."""

    quorum: int = option(1, "Machines to wait for before training starts.", min=1)
    launch: bool = option(False, "Launch the run too.", "--launch")


runs = HelpfulTyper(no_args_is_help=False, help="List runs; create and control your own.")


@runs.callback(invoke_without_command=True)
def list_runs(context: typer.Context, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the runs that this machine could join, or run one of the commands below."""
    if context.invoked_subcommand:
        return
    with closing(CoordinatorClient.from_state_dir(open_state_dir(home))) as site:
        views = fetch_all_runs(site)
    if as_json:
        print_json(
            [
                view.model_dump(include={"id", "slug", "name", "status", "launching"})
                for view in views
            ]
        )
        return
    table = new_table("run", "name", "status")
    table.columns[0].no_wrap = True  # other commands take it
    for view in views:
        table.add_row(escape(view.slug or view.id), escape(view.name), _name_status(view))
    out.print(table if views else "There are no runs yet.")


def _name_status(run: RunSummary) -> str:
    return "launching" if run.launching else run.status


@runs.command()
def create(
    name: Annotated[str, typer.Option(help="Name of the run, which everyone sees.")],
    rules: RulesOptions,
    text: TextOptions,
    terms: TermsOptions,
    launch: LaunchOptions,
    site: SiteOptions,
) -> None:
    """Create a run: a draft or, with --launch, one that waits for its text and machines."""
    request = {
        "name": name,
        "preset": rules.preset,
        "fields": rules.typed_fields() | text.typed_fields(),
        "quorum": launch.quorum,
        "launch": launch.launch,
        "terms": terms.to_request(),
    }
    site.print_answer(site.request("POST", "runs", body=request), print_run)


@runs.command("do")
def control_run(action: RunAction, run: RunArgument, site: SiteOptions) -> None:
    """Launch, pause, resume, finish, cancel, archive or unarchive a run of yours.

    `finish` ends it before its budget is spent, with the model it has; `cancel` gives it up.
    """
    site.print_answer(site.request("POST", "actions", action, run=run), print_run)


@runs.command("copy")
def copy_run(
    run: RunArgument,
    name: Annotated[str, typer.Option(help="Name of the copy.")] = "",
    checkpoint: Annotated[str, typer.Option(help="Start from the weights with this digest.")] = "",
    *,
    site: SiteOptions,
) -> None:
    """Copy another run's rules into a draft of yours."""
    request = {"name": name, "checkpoint": checkpoint}
    site.print_answer(site.request("POST", "copies", body=request, run=run), print_run)


@runs.command("terms")
def change_terms(run: RunArgument, terms: TermsOptions, site: SiteOptions) -> None:
    """Change who may join, with what, and the notes. Options left out keep their value."""
    answer = site.request("PATCH", "terms", body=terms.to_request(), run=run)
    site.print_answer(answer, print_run)


@runs.command()
def invite(
    run: RunArgument,
    note: Annotated[str, typer.Option(help="Whom it is for; only you see it.")] = "",
    *,
    site: SiteOptions,
) -> None:
    """Create a link that lets people join."""
    invitation = site.request("POST", "invitations", body={"note": note}, run=run)
    site.print_answer(invitation, lambda link: out.print(escape(link["url"]), soft_wrap=True))


@runs.command()
def checkpoints(run: RunArgument, site: SiteOptions) -> None:
    """List the weights that machines hold, and which of them are confirmed."""
    site.print_answer(site.request("GET", "checkpoints", run=run), _print_checkpoints)


def _print_checkpoints(answer: list[dict[str, Any]]) -> None:
    table = new_table("tokens", "digest", "machines", "confirmed")
    for checkpoint in answer:
        confirmed = "yes" if checkpoint["confirmed"] else "no"
        table.add_row(
            f"{checkpoint['tokens']:,}",
            escape(checkpoint["digest"]),
            f"{checkpoint['machines']:,}",
            "DISPUTED" if checkpoint["disputed"] else confirmed,
        )
    out.print(table if answer else "No machine has announced a checkpoint yet.")


@runs.command()
def verdict(
    run: RunArgument,
    machine: Annotated[
        str, typer.Argument(help="Whose updates: a machine's name, id or key, or KEY.INCARNATION.")
    ] = "",
    first: Annotated[
        int | None, typer.Option("--from", min=1, help="Remove this update and all later ones.")
    ] = None,
    update: Annotated[
        list[str] | None,
        typer.Option(help="Remove one update, NUMBER or NUMBER:TOKENS; repeatable."),
    ] = None,
    reason: Annotated[str, typer.Option(help="Reason, for everybody to read.")] = "",
    *,
    site: SiteOptions,
) -> None:
    """Remove a machine's updates from a run of yours, on every machine.

    Without a machine, it lists the updates that have been removed.

    `barnraise verdict` works without the site, where the text was prepared.
    """
    if not machine:
        site.print_answer(site.request("GET", "verdicts", run=run), _print_verdicts)
        return
    request = {
        "author": machine,
        "first": first,
        "updates": _parse_updates(update or []),
        "reason": reason,
    }
    _publish_verdict(site, run, request)


@runs.command()
def members(run: RunArgument, site: SiteOptions) -> None:
    """List the machines in a run."""
    machines = site.fetch_all("machines", run=run, as_machine=True)
    site.print_answer(machines, _print_members)


def _print_members(machines: list[dict[str, Any]]) -> None:
    table = new_table("machine", "owner", "key", "activity", "tokens", "tokens/s")
    for machine in machines:
        table.add_row(
            escape(machine["name"]),
            escape(machine["person"]),
            escape(machine["key"][:16]),
            escape(machine["activity"]) if machine["alive"] else "gone",
            f"{machine['tokens']:,}",
            f"{machine['rate']:,.0f}" if machine["alive"] else "",
        )
    out.print(table if machines else "No machine has joined yet.")


@runs.command()
def estimate(
    rules: RulesOptions,
    volunteers: Annotated[
        int, typer.Option(min=1, max=10_000, help="Number of such machines.")
    ] = 10,
    *,
    site: SiteOptions,
) -> None:
    """Estimate a run's step and duration on typical machines."""
    request = {
        "preset": rules.preset,
        "fields": rules.typed_fields(),
        "volunteers": volunteers,
    }
    answer = site.request("POST", "estimates", body=request)
    if site.as_json:
        print_json(answer)
        return
    durations = [f"{volunteers} of them, {line}" for line in LINES]
    table = new_table("machine", "a step", "tokens/s", *durations)
    for need in answer["needs"]:
        if need["refusal"]:
            table.add_row(escape(need["machine"]), escape(need["refusal"]))
            continue
        table.add_row(
            escape(need["machine"]),
            f"{need['step_seconds']:.2f} s",
            f"{need['tokens_per_second']:,.0f}",
            *(format_duration(pace["seconds"]) for pace in need["paces"]),
        )
    out.print(table)


def _parse_updates(texts: list[str]) -> dict[str, int]:
    """Map each update's number to its tokens, or to 0 where they are not given.

    Raises:
        StateError: a text is not NUMBER or NUMBER:TOKENS.
    """
    updates: dict[str, int] = {}
    for text in texts:
        number, _, tokens = text.partition(":")
        if not number.isdecimal() or not (tokens or "0").isdecimal():
            raise StateError(f"--update takes NUMBER or NUMBER:TOKENS, not '{text}'")
        updates[number] = int(tokens or 0)
    return updates


@runs.command()
def exclude(
    run: RunArgument,
    machine: Annotated[
        str, typer.Argument(help="A machine of the volunteer: its name, id or key.")
    ],
    keep_updates: Annotated[
        bool, typer.Option(help="Keep what the volunteer has published so far.")
    ] = False,
    reason: Annotated[str, typer.Option(help="Reason, for everybody to read.")] = "",
    *,
    site: SiteOptions,
) -> None:
    """Exclude a volunteer from a run of yours, with all machines. This cannot be undone.

    `barnraise verdict` works without the site, where the text was prepared.
    """
    request = {"exclude": machine, "keep_updates": keep_updates, "reason": reason}
    _publish_verdict(site, run, request)


def _publish_verdict(site: SiteOptions, run: RunAddress, request: dict[str, Any]) -> None:
    answer = site.request("POST", "verdicts", body=request, run=run)
    site.print_answer(answer, lambda verdict: _print_verdicts([verdict]))


def _print_verdicts(verdicts: list[dict[str, Any]]) -> None:
    """Print a table with a row for each author of removed updates."""
    table = new_table("issued", "machine", "removed", "reason")
    for answer in verdicts:
        verdict = Verdict.model_validate_json(answer["body"])
        for author in {**verdict.after, **verdict.updates}:
            removed = [str(number) for number in verdict.updates.get(author, {})]
            if author in verdict.after:
                removed.insert(0, f"from {verdict.after[author] + 1} on")
            table.add_row(
                escape(answer["given"][:16]),
                f"{author[:8]}….{author[-16:]}",
                ", ".join(removed),
                escape(verdict.reason),
            )
        for key in verdict.keys:
            given = escape(answer["given"][:16])
            table.add_row(given, f"{key[:8]}…", "excluded", escape(verdict.reason))
    out.print(table if verdicts else "No updates have been removed.")


def print_run(run: dict[str, Any]) -> None:
    """Print a run as the site returned it: its state, size and progress, and its address."""
    share = format_share(run["tokens"] / max(1, run["token_budget"]))
    is_launching = run["status"] == "draft" and run["launch_requested"]
    state = "launching" if is_launching else run["status"]
    out.print(
        f"[bold]{escape(run['slug'])}[/]  {escape(state)}  {run['parameters']:,} parameters  "
        f"{share} of its tokens"
    )
    out.print(escape(run["url"]), soft_wrap=True)
