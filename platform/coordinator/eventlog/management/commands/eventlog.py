"""The event log by hand. `show`: logs, their heads and the state hash. `adopt`: what rows say of subjects that no event
spoke of yet (`migrate` does it too). `rebuild`: every subject folded and written anew, after an upgrade. `cut`: a log's
events beyond a number are withdrawn, here. `resume`: a restored site that can reach no other mirror goes on all the
same, in a new log; what it decided between the backup and its end may come back later, and then counts."""

from django.core.management.base import BaseCommand, CommandError

from coordinator.eventlog import ingest, projection, truncate, writer
from coordinator.eventlog.models import Origin
from coordinator.lib.exceptions import UserError


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser) -> None:
        does = parser.add_subparsers(dest="does", required=True)
        for name in ("show", "adopt", "rebuild", "resume"):
            does.add_parser(name)
        one = does.add_parser("cut")
        one.add_argument("origin", help="32 hex digits")
        one.add_argument("seq", type=int, help="the last event that counts")
        one.add_argument("why")

    def handle(self, *, does: str, **options) -> None:
        if does == "adopt":
            self.stdout.write(f"{writer.record_existing_rows():,} events")
        elif does == "rebuild":
            ingest.project_pending()
            self.stdout.write(f"{projection.rebuild():,} subjects changed")
        elif does == "resume":
            waited = writer.is_restore_pending()
            writer.resume()
            self.stdout.write("a new log" if waited else "this site does not wait for anybody")
        elif does == "cut":
            try:
                withdrawn = truncate.truncate_log(options["origin"], options["seq"], options["why"])
            except UserError as error:
                raise CommandError(error.sentence) from None
            self.stdout.write(f"{withdrawn:,} events withdrawn")
        for origin in Origin.objects.all():
            mine = " (ours)" if origin.ours else ""
            end = "" if origin.cut_seq is None else f", cut after {origin.cut_seq}: {origin.why}"
            self.stdout.write(
                f"{origin.pk} of {origin.key[:8]}{mine}: {origin.head_seq:,} events{end}"
            )
        self.stdout.write(projection.state_hash())
