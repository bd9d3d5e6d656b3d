"""Examine this site: its servers, Celery and beat, mail, its public address, clock and disk."""

import json
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from coordinator.staff.doctor import Health, examine_site

MARKS = {Health.OK: "ok     ", Health.WARNING: "warning", Health.FAILURE: "FAILURE"}


class Command(BaseCommand):
    """Print a line for each part; fail if one does not work."""

    help = __doc__ or ""
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the option."""
        parser.add_argument("--json", action="store_true", help="one JSON object a line")

    def handle(self, *, json: bool = False, **options: Any) -> None:
        """Examine the site."""
        failures = 0
        for finding in examine_site():
            failures += finding.verdict is Health.FAILURE
            if json:
                self.stdout.write(_as_json(asdict(finding)))
            else:
                mark = MARKS[finding.verdict]
                self.stdout.write(f"{mark}  {finding.part:<16} {finding.sentence}")
        if failures:
            plural = "" if failures == 1 else "s"
            raise CommandError(f"{failures} part{plural} of this site do not work")


def _as_json(row: dict[str, Any]) -> str:
    return json.dumps(row)
