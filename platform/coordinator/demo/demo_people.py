"""The people of the demo: the owner, two volunteers and a member of the staff."""

import io
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from allauth.mfa import app_settings
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal import auth as totp
from django.core.management import call_command

from coordinator.accounts.models import User

PASSWORD_FILE = "demo_password"
STAFF_SECRET_FILE = "demo_staff_secret"  # of the staff's authenticator app, in base 32


@dataclass(frozen=True)
class DemoPerson:
    """Somebody of the demo, by what they type to sign in."""

    email: str
    name: str
    is_staff: bool = False


OWNER = DemoPerson("owner@barnraise.local", "Ottilie")
VOLUNTEERS = (
    DemoPerson("bela@barnraise.local", "Béla"),
    DemoPerson("carys@barnraise.local", "Carys"),
)
STAFF = DemoPerson("staff@barnraise.local", "Staff", is_staff=True)


class DemoPeople:
    """The accounts of the demo, with one password that the site's state folder stores."""

    def __init__(self, state: Path) -> None:
        self.password = _read_or_create(state / PASSWORD_FILE, f"barn-{secrets.token_hex(4)}")
        self.staff_secret = _read_or_create(state / STAFF_SECRET_FILE, totp.generate_totp_secret())

    def create(self, person: DemoPerson) -> User:
        """Create an account, or find the one of an earlier demo."""
        existing = User.objects.filter(email=person.email).first()
        if existing is None or not existing.check_password(self.password):
            call_command(
                "prepare_owner",
                email=person.email,
                password=self.password,
                name=person.name,
                staff=person.is_staff,
                stdout=io.StringIO(),
            )
        user = User.objects.get(email=person.email)
        if person.is_staff and not Authenticator.objects.filter(user=user).exists():
            totp.TOTP.activate(user, self.staff_secret)
        return user

    def staff_code(self) -> str:
        """Return the code that the staff's authenticator app shows now."""
        counter = int(time.time()) // app_settings.TOTP_PERIOD
        return totp.format_hotp_value(totp.hotp_value(self.staff_secret, counter))


def _read_or_create(path: Path, fresh: str) -> str:
    """Return what a file stores that only its owner may read; write it the first time."""
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(fresh)
    return path.read_text()
