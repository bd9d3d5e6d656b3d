"""Set up a mirror of a demo or a drill: its tables, then the list or another mirror's events."""

import time
from pathlib import Path
from typing import Any

import httpx
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser

from barnraise.protocol.mirror_list import SignedMirrorList

ANSWER_SECONDS = 180.0  # until the other mirror must answer


class Command(BaseCommand):
    """Set up a mirror."""

    help = __doc__ or ""
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        how = parser.add_mutually_exclusive_group(required=True)
        how.add_argument(
            "--publish", action="store_true", help="publish the list as the first one here"
        )
        how.add_argument("--join", metavar="URL", help="wait for this mirror and join it")
        parser.add_argument(
            "--list",
            type=Path,
            required=True,
            metavar="FILE",
            dest="list_file",
            help="the mirror list; it exists once that mirror answers",
        )

    def handle(self, *, publish: bool, join: str, list_file: Path, **options: Any) -> None:
        """Create the tables, then publish the list or join the other mirror."""
        call_command("migrate", verbosity=0, interactive=False)
        if publish:
            call_command("mirror_list", "publish", str(list_file), first=True)
            return
        deadline = time.monotonic() + ANSWER_SECONDS
        while not is_reachable(join):
            if time.monotonic() > deadline:
                raise CommandError(f"{join} did not answer in {ANSWER_SECONDS:.0f} seconds")
            time.sleep(0.2)
        call_command(
            "replication",
            "join",
            join,
            list_digest=SignedMirrorList.model_validate_json(list_file.read_bytes()).digest,
        )


def is_reachable(url: str) -> bool:
    """Return whether a site answers at this address."""
    try:
        return httpx.get(f"{url}/api/v1/mirror", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
