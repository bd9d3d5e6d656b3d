"""A mirror of a demo or a drill begins: its tables, and then the list, or all that another mirror has."""

import time
from pathlib import Path
from typing import Any

import httpx
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError

from barnraise.protocol.mirror_list import SignedMirrorList

PATIENCE = 180.0  # seconds until the other mirror must answer


class Command(BaseCommand):
    help = __doc__
    requires_system_checks: list[str] = []

    def add_arguments(self, parser) -> None:
        how = parser.add_mutually_exclusive_group(required=True)
        how.add_argument("--publish", action="store_true", help="the list, the first one here")
        how.add_argument("--join", metavar="URL", help="another mirror, waited for")
        parser.add_argument(
            "--list",
            type=Path,
            required=True,
            metavar="FILE",
            help="there once that mirror answers",
        )

    def handle(self, *, publish: bool, join: str, list: Path, **options: Any) -> None:
        call_command("migrate", verbosity=0, interactive=False)
        if publish:
            call_command("mirror_list", "publish", str(list), first=True)
            return
        deadline = time.monotonic() + PATIENCE
        while not answers(join):
            if time.monotonic() > deadline:
                raise CommandError(f"{join} did not answer in {PATIENCE:.0f} seconds")
            time.sleep(0.2)
        call_command(
            "replication",
            "join",
            join,
            list_digest=SignedMirrorList.model_validate_json(list.read_bytes()).digest,
        )


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v1/mirror", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
