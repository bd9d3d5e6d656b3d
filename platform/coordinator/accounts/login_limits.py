"""Limit guesses of passwords so that no stranger can lock an owner out.

A limit that counts by account alone is a switch with which anybody closes anybody's account. So
wrong passwords count by account and source: a browser that has signed in to this account before
(it has a cookie), or else a network. Guesses from many networks are limited as well, by account;
that limit leaves three ways in: a browser that signed in before, a second factor, and a code or
link by email. Emails are limited by address and source, too.

The idea of the cookie is from OWASP, "Slow Down Online Guessing Attacks with Device Cookies".
"""

import secrets
from typing import Any

from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from django.core import signing
from django.http import HttpRequest, HttpResponse

from barnraise.protocol.signing import digest
from coordinator.lib.period_counters import count_in_period, read_count
from coordinator.lib.subscriber_network import subscriber_network

COOKIE = "device"
COOKIE_SECONDS = 365 * 86_400
COOKIE_SALT = "accounts.device"
MAX_PEOPLE = 5  # whose browser one browser can be
HOUR = 3600
# Wrong passwords for one account in an hour from browsers that have not signed in to it before.
MAX_GUESSES = 50
# Emails to one address that people cause who have not signed in: from one source, and from all.
MAX_EMAILS = 5
EMAIL_SECONDS = 600
MAX_EMAILS_AN_HOUR = 60


def login_source(request: HttpRequest, email: str) -> str:
    """Return what wrong passwords for this account count by: a known browser, or a network."""
    device = recognise_device(request, email)
    return f"device {device}" if device else network(request)


def network(request: HttpRequest) -> str:
    """Return the network that a request came from."""
    return subscriber_network(request.META.get("REMOTE_ADDR", ""))


def recognise_device(request: HttpRequest, email: str) -> str:
    """Return the id of a browser that has signed in to this account before; "" for any other."""
    device, people = _read_cookie(request)
    if not people:
        return ""
    owners = EmailAddress.objects.filter(email__iexact=email).values_list("user", flat=True)
    return device if any(str(owner) in people for owner in owners) else ""


def remember_device(request: HttpRequest, response: HttpResponse, user: Any) -> None:
    """Set the cookie of a browser in which this person has signed in."""
    device, people = _read_cookie(request)
    people = [str(user.pk), *(person for person in people if person != str(user.pk))]
    value = {"id": device or secrets.token_hex(16), "people": people[:MAX_PEOPLE]}
    response.set_cookie(
        COOKIE,
        signing.dumps(value, salt=COOKIE_SALT),
        max_age=COOKIE_SECONDS,
        httponly=True,
        samesite="Lax",
        secure=request.is_secure(),
    )


def _read_cookie(request: HttpRequest) -> tuple[str, list[str]]:
    """Return (id of the browser, the people who have signed in there)."""
    try:
        value = signing.loads(
            request.COOKIES.get(COOKIE, ""), salt=COOKIE_SALT, max_age=COOKIE_SECONDS
        )
        return str(value["id"]), [str(person) for person in value["people"]]
    except (signing.BadSignature, KeyError, TypeError):
        return "", []


def record_wrong_password(request: HttpRequest, email: str) -> None:
    """Count a guess from a browser without an earlier sign-in to this account."""
    if not recognise_device(request, email):
        count_in_period(f"guesses:{_account_digest(email)}", HOUR)


def password_suffices(request: HttpRequest, email: str) -> bool:
    """Return whether a right password, and a second factor if there is one, is enough.

    While an account is being guessed from many networks, a right password from a browser that has
    not signed in before may be one of the guesses, unless a second factor follows.
    """
    if read_count(f"guesses:{_account_digest(email)}", HOUR) < MAX_GUESSES:
        return True
    if recognise_device(request, email):
        return True
    factors = (Authenticator.Type.TOTP, Authenticator.Type.WEBAUTHN)
    owners = EmailAddress.objects.filter(email__iexact=email).values("user")
    return Authenticator.objects.filter(user__in=owners, type__in=factors).exists()


def may_send_email(request: HttpRequest, email: str) -> bool:
    """Count an email that a request without a session causes; return whether it may be sent."""
    source = login_source(request, email)
    counted = f"emails:{_account_digest(email)}:{digest(source)[:16]}"
    if count_in_period(counted, EMAIL_SECONDS) > MAX_EMAILS:
        return False
    if source.startswith("device "):
        return True
    return count_in_period(f"emails:{_account_digest(email)}", HOUR) <= MAX_EMAILS_AN_HOUR


def _account_digest(email: str) -> str:
    return digest(email.strip().lower())[:32]
