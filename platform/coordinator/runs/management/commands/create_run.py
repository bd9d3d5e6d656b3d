"""Create a run from the command line and print its id."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from barnraise.errors import SpecError
from barnraise.spec import PRESETS
from coordinator.accounts.models import User
from coordinator.runs.drafts import NewRun
from coordinator.runs.models import Run
from coordinator.runs.spec_form import spec_from_fields


class Command(BaseCommand):
    """The command."""

    help = __doc__ or ""

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument("--owner", required=True, metavar="EMAIL")
        parser.add_argument("--name", required=True)
        parser.add_argument("--preset", default="gpt-nano", choices=PRESETS)
        parser.add_argument("--tokens", help="the token budget")
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="FIELD=VALUE",
            dest="fields",
            help="any field of the spec, such as recipe.learning_rate=0.001; repeatable",
        )
        parser.add_argument(
            "--report-every",
            type=float,
            default=NewRun.report_every,
            help="seconds between a machine's reports",
        )
        parser.add_argument(
            "--quorum",
            type=int,
            default=1,
            help="machines that must be alive before training starts",
        )
        parser.add_argument("--launch", action="store_true", help="launch it too")

    def handle(self, *args: Any, **options: Any) -> None:
        """Create the run."""
        owner = options["owner"]
        user = User.objects.filter(email__iexact=owner).first()
        if user is None:
            raise CommandError(
                f"there is nobody with the address {owner}; see the command prepare_owner"
            )
        values = {}
        for field in options["fields"]:
            key, equals, value = field.partition("=")
            if not equals:
                raise CommandError(f"--set takes FIELD=VALUE, not '{field}'")
            values[key.strip()] = value.strip()
        if options["tokens"]:
            values["recipe.token_budget"] = options["tokens"]
        try:
            new = NewRun(
                options["name"],
                spec_from_fields(values, options["preset"]),
                report_every=options["report_every"],
                quorum=options["quorum"],
            )
            run = Run.create(user, new)
        except SpecError as error:
            raise CommandError(str(error)) from None
        if options["launch"]:
            run.launch()
        self.stdout.write(str(run.pk))
