"""Run `barnraise privacy`: show what this machine sends to whom."""

from collections.abc import Sequence

from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from barnraise.cli.console import out
from barnraise.cli.disclosures import TO_NOBODY, TO_OTHERS, TO_PEERS, TO_SITE, Disclosure
from barnraise.cli.machine_options import HomeOption
from barnraise.state_dir import StateDir


def privacy(home: HomeOption = None) -> None:
    """Show what goes to the site, to other machines, and to nobody.

    It is all that the program can send: the list comes from the classes of its messages.
    """
    folder = StateDir.choose_path(home)
    is_enrolled = (folder / "coordinator.json").exists()
    site = f"To {StateDir(folder).membership.url}" if is_enrolled else "To the site of a run"
    _print_disclosures(site, TO_SITE)
    _print_disclosures("To the other machines of a run", TO_PEERS)
    out.print("[bold]To others[/]")
    _print_phrases(TO_OTHERS)
    out.print("\n[bold]To nobody[/]")
    _print_phrases(TO_NOBODY)


def _print_disclosures(receiver: str, disclosures: Sequence[Disclosure]) -> None:
    out.print(f"[bold]{escape(receiver)}[/]")
    for disclosure in disclosures:
        out.print(Padding(escape(disclosure.occasion), (0, 0, 0, 1)))
        _print_phrases(list(disclosure.fields))
    out.print()


def _print_phrases(phrases: Sequence[str]) -> None:
    """Print phrases as a list, whose lines break below their beginning."""
    table = Table.grid(padding=(0, 1))
    for phrase in phrases:
        table.add_row("  -", escape(phrase))
    out.print(table)
