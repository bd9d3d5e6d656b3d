"""Keeps the site in a folder: its database and its keys. The site goes on meanwhile."""

from pathlib import Path

from django.core.management.base import BaseCommand, CommandError

from coordinator.lib import backup


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser) -> None:
        parser.add_argument("folder", type=Path, help="a new one")

    def handle(self, *, folder: Path, **options) -> None:
        try:
            for path in backup.backup(folder):
                self.stdout.write(f"{path}  {path.stat().st_size:,} bytes")
        except (backup.BackupError, OSError) as error:
            raise CommandError(str(error)) from None
