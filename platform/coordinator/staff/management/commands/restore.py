"""Restore a site from a folder that `backup` wrote, into an empty database and state folder."""

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from coordinator.eventlog import writer
from coordinator.lib import backup
from coordinator.replication import mirror_list


class Command(BaseCommand):
    """Restore the database and the keys, and end the log that was backed up."""

    help = __doc__ or ""
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the folder."""
        parser.add_argument("folder", type=Path)
        parser.add_argument(
            "--check",
            action="store_true",
            help="only restore it into a scratch database, count the rows, and delete that again",
        )

    def handle(self, *, folder: Path, check: bool = False, **options: Any) -> None:
        """Restore the site; keep it read-only until a mirror of its list, if any, answers."""
        if check:
            self.check_backup(folder)
            return
        try:
            backup.restore_database(folder)
            # Without its keys the site cannot append to the old log yet.
            writer.abandon_log(wait_for_mirrors=True)
            backup.restore_keys(folder)
        except (backup.BackupError, OSError) as error:
            raise CommandError(str(error)) from None
        if not mirror_list.other_mirrors():
            writer.abandon_log(wait_for_mirrors=False)
        self.stdout.write(
            "The site is restored. Next: manage.py migrate; docs/operate.md lists what else to do."
        )

    def check_backup(self, folder: Path) -> None:
        """Print what a backup holds; this site stays as it is."""
        try:
            rows = backup.check_backup(folder)
        except (backup.BackupError, OSError) as error:
            raise CommandError(str(error)) from None
        for table, count in rows.items():
            self.stdout.write(f"{table}  {count:,} rows")
        self.stdout.write(f"{folder} can be restored.")
