"""Print the settings as a Markdown table; --write FILE inserts it into a document."""

import re
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from coordinator import settings

BEGIN, END = "<!-- settings: manage.py settings_table -->", "<!-- /settings -->"
LINE = re.compile(r"([A-Z][A-Z_]+)\s+(\S.*)")


def settings_table() -> str:
    """Build the table with one line per variable, in the order of settings.py."""
    rows: list[list[str]] = []
    for line in (settings.__doc__ or "").partition("\n\n")[2].splitlines():
        if found := LINE.fullmatch(line.strip()):
            rows.append([found[1], found[2]])
        elif line.strip():
            rows[-1][1] += f" {line.strip()}"
    lines = [f"| `{name}` | {text.replace('|', '/')} |" for name, text in rows]
    return "\n".join(["| variable | meaning |", "|---|---|", *lines])


def insert_table(text: str) -> str:
    """Replace the table between a document's markers; raise ValueError if it has none."""
    before, begun, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise ValueError(f"it has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{settings_table()}\n{END}{after}"


class Command(BaseCommand):
    """See the module."""

    help = __doc__ or ""
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the arguments."""
        parser.add_argument("--write", type=Path, metavar="FILE")

    def handle(self, *, write: Path | None, **options: Any) -> None:
        """Run the command."""
        if write is None:
            self.stdout.write(settings_table())
            return
        try:
            write.write_text(insert_table(write.read_text()))
        except (OSError, ValueError) as error:
            raise CommandError(f"{write}: {error}") from None
