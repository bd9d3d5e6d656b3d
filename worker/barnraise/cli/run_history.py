"""Run `barnraise runs show` and `barnraise runs history`: a run's progress, and its curves."""

import csv
import sys
from datetime import UTC, datetime
from typing import Annotated, Any, TextIO

import typer
from rich.markup import escape

from barnraise.cli.addresses import RunArgument
from barnraise.cli.console import new_table, out, print_json
from barnraise.cli.runs import print_run, runs
from barnraise.cli.site_options import SiteOptions
from barnraise.formats import format_duration, format_loss
from barnraise.protocol.types import replace_unprintable

Curves = dict[str, list[list[float]]]

TIMELINES = ("rate", "machines", "sent", "received", "staleness")  # curves over time
TIMED = ("train", "learning_rate", "gradient_norm")  # curves over tokens, each point with a time
SHOWN_LOSSES = 15  # rows of a table; --csv prints all


@runs.command()
def show(run: RunArgument, site: SiteOptions) -> None:
    """Show a run: its rules, its terms and its progress."""
    summary = site.request("GET", "summary", run=run, as_machine=True)
    if site.as_json:
        print_json(summary)
        return
    machines = site.fetch_all("machines", run=run, as_machine=True)
    print_run(summary)
    for label, text in describe_progress(summary, machines):
        out.print(f"{label:<10} {text}", soft_wrap=True)


@runs.command()
def history(
    run: RunArgument,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print all curves as comma-separated values.")
    ] = False,
    *,
    site: SiteOptions,
) -> None:
    """Show the course of a run's loss, or print all its curves for other programs.

    Example: barnraise runs history first-barn --csv > first-barn.csv
    """
    answer = site.request("GET", "history", run=run, as_machine=True)
    if site.as_json:
        print_json(answer)
    elif as_csv:
        write_history(answer["curves"], sys.stdout)
    else:
        _print_losses(answer["curves"])


def describe_progress(run: dict[str, Any], machines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return a run's progress as labels and texts, from its summary and machines."""
    alive = [machine for machine in machines if machine["alive"]]
    rate = sum(machine["rate"] for machine in alive)
    training, validation = format_loss(run["training_loss"]), format_loss(run["validation_loss"])
    rows = [
        ("owner", escape(run["owner"])),
        ("tokens", f"{run['tokens']:,} of {run['token_budget']:,}"),
        ("loss", f"{training} training, {validation} validation"),
        ("machines", f"{len(alive)} of {len(machines)} at work, {rate:,.0f} tokens/s"),
    ]
    left = run["token_budget"] - run["tokens"]
    if run["status"] == "training" and rate and left > 0:
        rows.append(("time left", f"about {format_duration(left / rate)}"))
    return rows


def write_history(curves: Curves, file: TextIO) -> None:
    """Write curves as CSV, one value a row: its curve, the tokens or the time (UTC), the value.

    Training losses have both tokens and time.
    """
    clock = {tokens: at for tokens, at in curves.get("clock", [])}
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["curve", "tokens", "time", "value"])
    for name, points in curves.items():
        if name == "clock":
            continue
        for x, value in points:
            tokens: str | int = int(x)
            at = clock.get(x) if name in TIMED else None
            if name in TIMELINES:
                tokens, at = "", x
            time = "" if at is None else datetime.fromtimestamp(at, UTC).isoformat("T", "seconds")
            writer.writerow([replace_unprintable(name), tokens, time, value])


def _print_losses(curves: Curves) -> None:
    """Print the validation losses, or while there is none the training losses, thinned."""
    name = "validation" if curves.get("validation") else "train"
    points = curves.get(name, [])
    if not points:
        out.print("No loss has been measured yet.")
        return
    table = new_table("tokens", "validation loss" if name == "validation" else "training loss")
    shown = {step * (len(points) - 1) // SHOWN_LOSSES for step in range(SHOWN_LOSSES + 1)}
    for index in sorted(shown):
        tokens, loss = points[index]
        table.add_row(f"{int(tokens):,}", format_loss(loss))
    out.print(table)
