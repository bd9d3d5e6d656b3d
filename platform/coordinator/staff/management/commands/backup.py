"""Back up the site's database and keys to a folder, while the site runs."""

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from coordinator.lib import backup, backup_record


class Command(BaseCommand):
    """Write a backup."""

    help = __doc__ or ""

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the folder."""
        parser.add_argument("folder", type=Path, help="a new folder; with --keep, their parent")
        parser.add_argument(
            "--keep",
            type=int,
            help="write into a new folder below it, named by the time, and keep so many of them",
        )

    def handle(self, *, folder: Path, keep: int | None, **options: Any) -> None:
        """Write the backup and list its files; then delete old ones, if asked to."""
        if keep is not None and keep < 1:
            raise CommandError("--keep must be 1 or more")
        target = folder / f"{timezone.now():%Y-%m-%dT%H%M%S}" if keep else folder
        try:
            files = backup.backup(target)
            for path in files:
                self.stdout.write(f"{path}  {path.stat().st_size:,} bytes")
            backup_record.record_backup(settings.STATE_DIR, files)
            for old in backup.rotate_backups(folder, keep) if keep else ():
                self.stdout.write(f"deleted {old}")
        except (backup.BackupError, OSError) as error:
            raise CommandError(str(error)) from None
