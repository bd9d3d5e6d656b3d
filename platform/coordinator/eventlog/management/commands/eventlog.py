"""Inspect and repair the event log by hand.

show      logs, their heads and the state hash
adopt     record events for rows that no event describes (`migrate` does this as well)
rebuild   fold all aggregates and write their rows again, after an upgrade
truncate  withdraw a log's events after a number, at this site
resume    let a restored site continue in a new log if it can reach no other mirror; what it decided
          between the backup and its end may arrive later, and then counts
change-owner  let the database belong to this host's mirror.key and SECRET_KEY, in a new log
"""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from coordinator.eventlog import database_owner, ingest, projection, truncate, writer
from coordinator.eventlog.models import Origin
from coordinator.lib.exceptions import UserError


class Command(BaseCommand):
    """Run one action on the event log, then print all logs and the state hash."""

    help = __doc__ or ""

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare one subcommand for each action."""
        actions = parser.add_subparsers(dest="action", required=True)
        for name in ("show", "adopt", "rebuild", "resume", "change-owner"):
            actions.add_parser(name)
        truncation = actions.add_parser("truncate")
        truncation.add_argument("origin", help="id of the log, 32 hex digits")
        truncation.add_argument("seq", type=int, help="the last event that counts")
        truncation.add_argument("reason")

    def handle(self, *, action: str, **options: Any) -> None:
        """Run the action and print the logs."""
        if action == "adopt":
            self.stdout.write(f"{writer.record_existing_rows():,} events")
        elif action == "rebuild":
            ingest.project_pending()
            self.stdout.write(f"{projection.rebuild():,} aggregates changed")
        elif action == "resume":
            was_pending = writer.is_restore_pending()
            writer.resume()
            self.stdout.write(
                "started a new log" if was_pending else "this site does not wait for any mirror"
            )
        elif action == "change-owner":
            database_owner.change_owner()
        elif action == "truncate":
            self._truncate(options["origin"], options["seq"], options["reason"])
        self._print_logs()

    def _truncate(self, origin: str, seq: int, reason: str) -> None:
        try:
            withdrawn = truncate.truncate_log(origin, seq, reason)
        except UserError as error:
            raise CommandError(error.sentence) from None
        self.stdout.write(f"{withdrawn:,} events withdrawn")

    def _print_logs(self) -> None:
        for origin in Origin.objects.all():
            ours = " (ours)" if origin.ours else ""
            end = ""
            if origin.last_valid_seq is not None:
                end = f", truncated after {origin.last_valid_seq}: {origin.truncation_reason}"
            self.stdout.write(
                f"{origin.pk} of {origin.key[:8]}{ours}: {origin.head_seq:,} events{end}"
            )
        self.stdout.write(projection.state_hash())
