"""Join other mirrors, or pull from them now.

join URL  fetch the mirror list and all events from any one mirror
pull      pull from every other mirror of the list once
"""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connection

from barnraise.protocol.mirror_list import MirrorList
from coordinator.eventlog.projection import state_hash
from coordinator.lib.environment import parse_origin
from coordinator.lib.exceptions import UserError
from coordinator.replication import bootstrap, pull


class Command(BaseCommand):
    """Run one action, then pull from all mirrors and print the state hash."""

    help = __doc__ or ""

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare one subcommand for each action."""
        actions = parser.add_subparsers(dest="action", required=True)
        join = actions.add_parser("join", help="fetch all that another mirror has")
        join.add_argument("url", help="address of any mirror")
        join.add_argument(
            "--list",
            default="",
            dest="list_digest",
            help="the digest of the mirror list, as an operator told you",
        )
        actions.add_parser("pull", help="pull from every other mirror, once")

    def handle(self, *, action: str, **options: Any) -> None:
        """Run the action."""
        if action == "join":
            self._join(options["url"], options["list_digest"])
        for key, result in pull.pull_from_all(patient=False).items():
            self.stdout.write(f"{key[:8]}: {result.stored} events")
            for sentence in result.refused:
                self.stdout.write(f"  {sentence}")
        self.stdout.write(f"state {state_hash()}")

    def _join(self, url: str, list_digest: str) -> None:
        def confirm(newest: MirrorList, digest: str) -> bool:
            self.stdout.write(f"Mirror list {newest.version}, BLAKE3 {digest}")
            for entry in newest.mirrors:
                expelled = " (expelled)" if entry.expelled else ""
                self.stdout.write(f"  {entry.key[:16]} {entry.url} {entry.name}{expelled}")
            if list_digest:
                return digest == list_digest
            answer = input("Is this what an operator of that site told you? [yes/no] ")
            return answer.strip().lower() == "yes"

        with connection.cursor() as cursor:
            # What a power cut loses of this, the next join fetches again.
            cursor.execute("SET synchronous_commit = off")
        try:
            result = bootstrap.join(parse_origin(url), confirm, self.stdout.write)
        except UserError as error:
            raise CommandError(error.sentence) from None
        for sentence in result.refused:
            self.stderr.write(sentence)
