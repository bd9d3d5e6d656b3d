"""Ensure that a person exists, with a verified address, and a password or a link to set one."""

import sys
from getpass import getpass
from typing import Any

from allauth.account.forms import default_token_generator
from allauth.account.models import EmailAddress
from allauth.account.utils import user_pk_to_url_str
from django.conf import settings
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.core.validators import validate_email
from django.urls import reverse

from coordinator.accounts.models import User
from coordinator.eventlog import writer as mirrors


class Command(BaseCommand):
    """The command; to run it again changes nothing."""

    help = __doc__ or ""

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument("--email", required=True)
        parser.add_argument(
            "--password",
            help="better left out: it is asked for, and stays out of the shell's history",
        )
        parser.add_argument(
            "--link",
            action="store_true",
            help="print a link to set the password, for somebody else",
        )
        parser.add_argument("--name", default="")
        parser.add_argument(
            "--staff", action="store_true", help="may use the admin, with every permission"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Create or update the person, and print their id, or the link to set the password."""
        staff = options["staff"]
        email = options["email"].strip().lower()
        try:
            validate_email(email)
        except ValidationError:
            raise CommandError(f"'{email}' is not an email address") from None
        password = options["password"]
        if not password and not options["link"]:
            password = read_password()
        with mirrors.log_transaction():
            user = User.objects.filter(email__iexact=email).first() or User.objects.create_user(
                email, password
            )
            user.name = options["name"] or user.name
            if staff:
                user.is_staff = user.is_superuser = True
            if password and not user.check_password(password):
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
        self.stdout.write(password_link(user) if options["link"] else str(user.pk))


def read_password() -> str:
    """Read a password twice from the terminal.

    Raises:
        CommandError: There is no terminal, or the password is too weak.
    """
    if not sys.stdin.isatty():
        raise CommandError(
            "there is no terminal to type a password at: use --link, which prints an address to "
            "set one, or --password"
        )
    password = getpass("Password: ")
    if password != getpass("Again: "):
        raise CommandError("the two passwords differ")
    try:
        validate_password(password)
    except ValidationError as error:
        raise CommandError(" ".join(error.messages)) from None
    return password


def password_link(user: User) -> str:
    """Return the address at which a person sets their password, once."""
    key = default_token_generator.make_token(user)
    path = reverse(
        "account_reset_password_from_key",
        kwargs={"uidb36": user_pk_to_url_str(user), "key": key},
    )
    return f"{settings.SITE_URL}{path}"
