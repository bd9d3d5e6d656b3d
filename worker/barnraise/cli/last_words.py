"""Compose the last words of `barnraise join`: what this machine did, and where the model is."""

from pathlib import Path

from rich.markup import escape

from barnraise.formats import format_count, format_share
from barnraise.state_dir import SiteMembership
from barnraise.training.local_status import LocalStatus


def compose_last_words(
    run: str, folder: Path, status: LocalStatus | None, has_left: bool, membership: SiteMembership
) -> list[str]:
    """Compose the sentences with which a worker ends, in the console's markup.

    Args:
        run: the run's name in addresses.
        folder: the run's state on this machine.
        status: the worker's last status; None if it ended before it had one.
        has_left: whether the person ended it, and not the run.
        membership: this machine's enrolment at the site.
    """
    run = escape(run)
    own = status.tokens if status else 0
    total = status.ledger_tokens if status else 0
    lines = ["Left." if has_left else "The run has ended."]
    if own:
        share = format_share(own / max(1, total))
        sent = status.updates_sent if status else 0
        updates = "update" if sent == 1 else "updates"
        lines.append(
            f"This machine trained {format_count(own)} of the run's {format_count(total)} tokens "
            f"({share}) and published {sent:,} {updates}."
        )
    lines.append(f"Everything is saved in {escape(str(folder))}")
    if has_left:
        lines.append(f"Continue:     [bold]barnraise join {run}[/]")
    if total:
        lines.append(f"The model:    [bold]barnraise export {run} FOLDER[/]")
        if not has_left:
            lines.append(f"Share it:     [bold]barnraise serve {run}[/]")
    if own:
        address = f"{membership.url}/machines/{membership.machine}/certificate/"
        lines.append(f"Certificate:  {escape(address)}")
    return lines
