"""Ensure that a person exists, with this password and a verified address."""

from typing import Any

from allauth.account.models import EmailAddress
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.core.validators import validate_email

from coordinator.accounts.models import User
from coordinator.eventlog import writer as mirrors


class Command(BaseCommand):
    """The command; to run it again changes nothing."""

    help = __doc__ or ""

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument("--email", required=True)
        parser.add_argument("--password", required=True)
        parser.add_argument("--name", default="")
        parser.add_argument(
            "--staff", action="store_true", help="may use the admin, with every permission"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Create or update the person, and print their id."""
        password, staff = options["password"], options["staff"]
        email = options["email"].strip().lower()
        try:
            validate_email(email)
        except ValidationError:
            raise CommandError(f"'{email}' is not an email address") from None
        with mirrors.log_transaction():
            user = User.objects.filter(email__iexact=email).first() or User.objects.create_user(
                email, password
            )
            user.name = options["name"] or user.name
            if staff:
                user.is_staff = user.is_superuser = True
            if not user.check_password(password):
                user.set_password(password)
            user.save()
            EmailAddress.objects.filter(user=user).exclude(email__iexact=email).update(
                primary=False
            )
            EmailAddress.objects.update_or_create(
                user=user,
                email__iexact=email,
                defaults={"email": email, "verified": True, "primary": True},
            )
        self.stdout.write(str(user.pk))
