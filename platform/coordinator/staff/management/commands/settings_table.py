"""The settings as a table in Markdown, from where they are written down: settings.py. --write FILE puts it between the
file's marks."""

import re
from pathlib import Path

from django.core.management.base import BaseCommand, CommandError

from coordinator import settings

BEGIN, END = "<!-- settings: manage.py settings_table -->", "<!-- /settings -->"
LINE = re.compile(r"([A-Z][A-Z_]+)\s+(\S.*)")


def settings_table() -> str:
    """One line a variable, in the order of settings.py."""
    rows: list[list[str]] = []
    for line in (settings.__doc__ or "").partition("\n\n")[2].splitlines():
        if found := LINE.fullmatch(line.strip()):
            rows.append([found[1], found[2]])
        elif line.strip():
            rows[-1][1] += f" {line.strip()}"
    lines = [f"| `{name}` | {text.replace('|', '/')} |" for name, text in rows]
    return "\n".join(["| variable | what it says |", "|---|---|", *lines])


def insert_table(text: str) -> str:
    """The text with a fresh table between its marks. Raises ValueError where it has none."""
    before, begun, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise ValueError(f"it has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{settings_table()}\n{END}{after}"


class Command(BaseCommand):
    help = __doc__
    requires_system_checks = []

    def add_arguments(self, parser) -> None:
        parser.add_argument("--write", type=Path, metavar="FILE")

    def handle(self, *, write: Path | None, **options) -> None:
        if write is None:
            self.stdout.write(settings_table())
            return
        try:
            write.write_text(insert_table(write.read_text()))
        except (OSError, ValueError) as error:
            raise CommandError(f"{write}: {error}") from None
