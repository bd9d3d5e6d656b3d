"""Run `barnraise status`: show what this machine has done in each of its runs."""

import contextlib
import json
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from barnraise.cli.console import new_table, out
from barnraise.cli.machine_options import HomeOption, JsonOption, open_state_dir
from barnraise.errors import StateError
from barnraise.formats import format_byte_rate
from barnraise.state_dir import StateDir


def status(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show what this machine has done in each of its runs."""
    state_dir = open_state_dir(home)
    statuses = _load_statuses(state_dir)
    if as_json:
        out.print_json(json.dumps(statuses))
        return
    for run in statuses:
        out.print(f"[bold]{escape(run['name'])}[/]", format_status(run), soft_wrap=True)
        if run.get("waiting"):
            out.print(f"  [yellow]{escape(run['waiting'])}[/]", soft_wrap=True)
        if run.get("neighbours"):
            out.print(_peer_table(run["neighbours"]))
    if not statuses:
        out.print(_describe_next_step(state_dir))


def _load_statuses(state_dir: StateDir) -> list[dict[str, Any]]:
    """Load the status that each run's worker wrote last; skip a missing or incomplete file."""
    statuses: list[dict[str, Any]] = []
    for folder in state_dir.run_folders():
        # A crash may leave an incomplete file. It holds no state, so that nothing is lost.
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            statuses.append(json.loads((folder / "status.json").read_text()))
    return statuses


def _describe_next_step(state_dir: StateDir) -> str:
    """Name the command that a machine without runs needs next."""
    try:
        _ = state_dir.membership
    except StateError as error:
        return str(error)
    return "This machine has not trained yet: [bold]barnraise join RUN[/]"


def format_status(status: dict[str, Any]) -> Text:
    """Return one line of activity, step, loss, speed, updates, peers, exchange and progress."""
    activity = status["activity"]
    loss = f"{status['loss']:.3f}" if status["loss"] is not None else "–"
    share = min(1.0, status["ledger_tokens"] / status["token_budget"])
    return Text.assemble(
        (f"{activity:<10}", "bold" if activity == "training" else "yellow"),
        f" step {status['step']:>6,}  loss {loss:>6}  {status['rate']:>8,.0f} tok/s  ",
        f"↑{status['updates_sent']:>4} ↓{status['updates_received']:>4}  {status['peers']} peers  ",
        _format_exchange(status.get("exchange")),  # older versions did not write it
        (f"{share:>4.0%}", "cyan"),
    )


def _format_exchange(exchange: dict[str, Any] | None) -> str:
    """Return the round's length, the compression, the use of the uplink, and the lag."""
    if not exchange:
        return ""
    sent_rate = exchange["sent_rate"]
    uplink_rate = exchange["uplink_rate"]
    parts = [
        f"{exchange['round_steps']} steps a round, {exchange['bits_per_parameter']:.3g} bits",
        f"{format_byte_rate(sent_rate)} up",
    ]
    if uplink_rate > sent_rate > 0:
        parts[-1] += f" ({sent_rate / uplink_rate:.0%} of the line)"
    if exchange["lag"]:
        parts.append(f"{exchange['lag']:,} behind")
    return "".join(f"{part}  " for part in parts)


def _peer_table(peers: list[dict[str, Any]]) -> Table:
    """Return the linked peers: their lag, their traffic, and whether their weights equal ours."""
    table = new_table("  peer", "lag", "↑", "↓", "same weights")
    for peer in peers:
        agrees = peer["agrees"]
        table.add_row(
            f"  {peer['key'][:8]}",
            f"{peer['lag']:,}",
            format_byte_rate(peer["up"]),
            format_byte_rate(peer["down"]),
            {True: "yes", False: "NO", None: "–"}[agrees],
            style="bold red" if agrees is False else None,
        )
    return table
