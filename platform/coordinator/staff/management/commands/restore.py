"""Brings a site back from a folder that `backup` made, into an empty database and an empty state folder."""

from pathlib import Path

from django.core.management.base import BaseCommand, CommandError

from coordinator.lib import backup


class Command(BaseCommand):
    help = __doc__
    requires_system_checks = []

    def add_arguments(self, parser) -> None:
        parser.add_argument("folder", type=Path)

    def handle(self, *, folder: Path, **options) -> None:
        try:
            backup.restore(folder)
        except (backup.BackupError, OSError) as error:
            raise CommandError(str(error)) from None
        self.stdout.write(
            "The site is back as it was kept. Now: manage.py migrate; docs/operate.md says what else."
        )
