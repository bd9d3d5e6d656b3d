"""manage.py replication join URL · pull: this site as one of several."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connection

from barnraise.protocol.mirror_list import MirrorList
from coordinator.eventlog.projection import state_hash
from coordinator.lib.exceptions import UserError
from coordinator.replication import bootstrap, pull


class Command(BaseCommand):
    help = "Begin as a mirror of others, or pull from them now."

    def add_arguments(self, parser: CommandParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True)
        join = verbs.add_parser(
            "join", help="take over all that another mirror has; any one will do"
        )
        join.add_argument("url")
        join.add_argument(
            "--list",
            default="",
            help="the digest of the mirror list, as a mirror's people told you",
        )
        verbs.add_parser("pull", help="pull from every other mirror, once")

    def handle(self, *, verb: str, **options: Any) -> None:
        if verb == "join":
            self.join(**options)
        for key, done in pull.pull_from_all(patient=False).items():
            self.stdout.write(
                f"{key[:8]}: {done.stored} events" + "".join(f"\n  {each}" for each in done.refused)
            )
        self.stdout.write(f"state {state_hash()}")

    def join(self, url: str, list: str, **options: Any) -> None:
        def sure(found: MirrorList, digest: str) -> bool:
            self.stdout.write(f"Mirror list {found.version}, BLAKE3 {digest}")
            for each in found.mirrors:
                self.stdout.write(
                    f"  {each.key[:16]} {each.url} {each.name}{' (expelled)' if each.expelled else ''}"
                )
            if list:
                return digest == list
            return (
                input("Is this what the people of that site told you? [yes/no] ").strip().lower()
                == "yes"
            )

        with (
            connection.cursor() as cursor
        ):  # what a power cut takes of this, the next join takes again
            cursor.execute("SET synchronous_commit = off")
        try:
            done = bootstrap.join(url, sure, self.stdout.write)
        except UserError as error:
            raise CommandError(error.sentence) from None
        for sentence in done.refused:
            self.stderr.write(sentence)
