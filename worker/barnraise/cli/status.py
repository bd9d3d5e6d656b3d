"""Run `barnraise status`: show what this machine has done in each of its runs."""

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from barnraise.cli.console import new_table, out, print_json
from barnraise.cli.limits import summarise_limits
from barnraise.cli.machine_options import HomeOption, JsonOption, open_state_dir
from barnraise.cli.panel import build_panel
from barnraise.cli.run_folders import RunFolder, list_run_folders
from barnraise.errors import StateError
from barnraise.exchange.stats import NeighbourView
from barnraise.formats import format_byte_rate, format_bytes, format_duration, format_share
from barnraise.protocol.enums import Activity
from barnraise.protocol.reports import ExchangeView
from barnraise.state_dir import StateDir
from barnraise.training.crew.crew_status import read_crew_status
from barnraise.training.local_control import find_other_worker
from barnraise.training.local_status import LocalStatus

WATCH_SECONDS = 2.0  # between two pictures of --watch


def status(
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again every 2 s until Ctrl-C.")
    ] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what this machine has done in each of its runs, and the disk space that each takes."""
    state_dir = open_state_dir(home)
    if as_json:
        _print_statuses_as_json(state_dir)
        return
    try:
        while watch:
            out.clear()
            _print_statuses(state_dir)
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        return
    _print_statuses(state_dir)


def _print_statuses_as_json(state_dir: StateDir) -> None:
    folders = list_run_folders(state_dir)
    print_json(
        [
            folder.status.model_dump(mode="json")
            | {"running": folder.is_running, "disk_bytes": folder.disk_bytes()}
            for folder in folders
            if folder.status is not None
        ]
    )


def _print_statuses(state_dir: StateDir) -> None:
    folders = list_run_folders(state_dir)
    limits = summarise_limits(state_dir.limits)
    is_ascii = not (out.encoding or "").lower().startswith("utf")
    for folder in folders:
        _print_run(folder, limits, is_ascii)
    if not folders:
        out.print_sentence(_describe_next_step(state_dir))


def _print_run(folder: RunFolder, limits: str, is_ascii: bool) -> None:
    run_status = folder.status
    running = folder.is_running
    if run_status is None:
        crew = read_crew_status(folder.path)
        state = "in a crew; barnraise crew status" if crew else "not trained yet"
        out.print(Text.assemble((folder.name, "bold"), f"  {state}"))
    else:
        shown = run_status.model_copy(update={"warning": ""})
        out.print(build_panel(shown, limits, "", out.width, is_ascii, running))
        if running and run_status.warning:  # whole, where the panel has one line
            out.print(Text.assemble(("Warning    ", "dim"), (run_status.warning, "yellow")))
    out.print(
        Text.assemble(("Worker     ", "dim"), _describe_worker(folder, running, run_status)),
        Text.assemble(("Disk       ", "dim"), format_bytes(folder.disk_bytes())),
        sep="\n",
    )
    if run_status is not None and running:
        if run_status.plan and "," in run_status.device:
            cards = f"{run_status.plan.device}: {run_status.device}"
            out.print(Text.assemble(("Cards      ", "dim"), cards))
        if run_status.exchange:
            out.print(Text.assemble(("Rounds     ", "dim"), _describe_rounds(run_status.exchange)))
        if run_status.neighbours:
            out.print(_peer_table(run_status.neighbours))
    out.print()


def _describe_worker(folder: RunFolder, running: bool, run_status: LocalStatus | None) -> str:
    """Describe whether a worker runs, and since when not."""
    if running and run_status is not None and run_status.memory_shortages:
        count = run_status.memory_shortages
        times = "once" if count == 1 else f"{count} times"
        return f"running; memory ran short {times}, and the plan was made smaller"
    if running:
        return "running"
    has_ended = run_status is not None and run_status.activity is Activity.FINISHED
    if not has_ended and find_other_worker([folder.path]):
        return "waits for its turn: its worker trains another run"
    if run_status is None or not run_status.at:
        return "not running"
    ago = format_duration(max(0.0, time.time() - run_status.at))
    if run_status.activity is Activity.FINISHED:
        return f"finished {ago} ago; barnraise export {folder.slug} FOLDER"
    return f"stopped {ago} ago; barnraise join {folder.slug}"


def _describe_rounds(exchange: ExchangeView) -> str:
    """Describe how long a round is, how compressed its update, and the use of the uplink."""
    text = f"{exchange.round_steps} steps, {exchange.bits_per_parameter:.3g} bits a parameter"
    uplink = exchange.uplink_rate
    if uplink > exchange.sent_rate > 0:
        text += f", {format_share(exchange.sent_rate / uplink)} of the uplink"
    return text


def _describe_next_step(state_dir: StateDir) -> str:
    """Name the command that a machine without runs needs next."""
    try:
        _ = state_dir.membership
    except StateError as error:
        sentence = str(error)
        return sentence[:1].upper() + sentence[1:]
    return "This machine has not trained yet: [bold]barnraise join RUN[/]"


def _peer_table(peers: Sequence[NeighbourView]) -> Table:
    """Return the linked peers: their lag, their traffic, and whether their weights equal ours."""
    table = new_table("  peer", "lag", "up", "down", "same weights")
    for peer in peers:
        table.add_row(
            f"  {escape(peer.key[:8])}{' relayed' if peer.relayed else ''}",
            f"{peer.lag:,}",
            format_byte_rate(peer.up),
            format_byte_rate(peer.down),
            {True: "yes", False: "NO", None: "–"}[peer.agrees],
            style="bold red" if peer.agrees is False else None,
        )
    return table
