"""Print the settings as a Markdown table; --write FILE inserts it into a document."""

import re
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from coordinator import settings

START_MARK = "<!-- settings: manage.py settings_table -->"
END_MARK = "<!-- /settings -->"
VARIABLE_LINE = re.compile(r"([A-Z][A-Z_]+)\s+(\S.*)")


def settings_table() -> str:
    """Build the table with one line per variable, in the order of settings.py."""
    rows: list[list[str]] = []
    for line in (settings.__doc__ or "").partition("\n\n")[2].splitlines():
        text = line.strip()
        match = VARIABLE_LINE.fullmatch(text)
        if match:
            rows.append([match[1], match[2]])
        elif text:
            rows[-1][1] += f" {text}"
    lines = [f"| `{name}` | {text.replace('|', '/')} |" for name, text in rows]
    return "\n".join(["| variable | meaning |", "|---|---|", *lines])


def insert_table(text: str) -> str:
    """Replace the table between a document's markers; raise ValueError if it has none."""
    before, start_mark, rest = text.partition(START_MARK)
    _, end_mark, after = rest.partition(END_MARK)
    if not start_mark or not end_mark:
        raise ValueError(f"it has no {START_MARK} … {END_MARK}")
    return f"{before}{START_MARK}\n{settings_table()}\n{END_MARK}{after}"


class Command(BaseCommand):
    """Print the table, or insert it into a document."""

    help = __doc__ or ""
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the option."""
        parser.add_argument("--write", type=Path, metavar="FILE")

    def handle(self, *, write: Path | None, **options: Any) -> None:
        """Print or insert the table."""
        if write is None:
            self.stdout.write(settings_table())
            return
        try:
            write.write_text(insert_table(write.read_text()))
        except (OSError, ValueError) as error:
            raise CommandError(f"{write}: {error}") from None
