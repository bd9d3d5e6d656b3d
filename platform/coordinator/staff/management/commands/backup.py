"""Back up the site's database and keys to a folder, while the site runs."""

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from coordinator.lib import backup


class Command(BaseCommand):
    """Write a backup."""

    help = __doc__ or ""

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the folder."""
        parser.add_argument("folder", type=Path, help="a new folder")

    def handle(self, *, folder: Path, **options: Any) -> None:
        """Write the backup and list its files."""
        try:
            for path in backup.backup(folder):
                self.stdout.write(f"{path}  {path.stat().st_size:,} bytes")
        except (backup.BackupError, OSError) as error:
            raise CommandError(str(error)) from None
