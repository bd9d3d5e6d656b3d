"""Forms for second factors.

A code works once, at one mirror; a passkey works at the site where it was created.
"""

import json
from functools import cached_property
from typing import Any, cast
from urllib.parse import urlsplit

from allauth.core import context
from allauth.core.internal.cryptokit import compare_user_code
from allauth.mfa.base.forms import AuthenticateForm, BaseAuthenticateForm, ReauthenticateForm
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal.auth import (
    format_hotp_value,
    hotp_value,
    yield_hotp_counters_from_time,
)
from allauth.mfa.utils import decrypt
from django import forms
from fido2.utils import websafe_decode

from barnraise.protocol.signing import digest
from coordinator.replication import one_time_codes


class SingleUseCodeForm(BaseAuthenticateForm):
    """A form that asks for a code, and marks the code of an app as used at all mirrors."""

    user: Any
    authenticator: Authenticator

    def clean_code(self) -> str:
        """Check the code, and that it was not used before."""
        code = super().clean_code()
        if self.authenticator.type == Authenticator.Type.TOTP and not one_time_codes.use_once(
            code_fingerprint(self.authenticator, code)
        ):
            raise forms.ValidationError(
                "This code was used already. Wait for the next one of your app."
            )
        return code

    @cached_property
    def passkeys(self) -> set[str]:
        """The host names of the sites where the person's passkeys were created."""
        rows = Authenticator.objects.filter(user=self.user, type=Authenticator.Type.WEBAUTHN)
        return {site for row in rows if (site := passkey_host(row))}

    @property
    def passkey_here(self) -> bool:
        """Whether a passkey works at this site."""
        return cast(Any, context.request).get_host().partition(":")[0] in self.passkeys

    @property
    def passkeys_elsewhere(self) -> list[str]:
        """The sites where a passkey works, if it does not here."""
        return [] if self.passkey_here else sorted(self.passkeys)

    @cached_property
    def app(self) -> bool:
        """Whether the person has an app that generates codes."""
        return Authenticator.objects.filter(user=self.user, type=Authenticator.Type.TOTP).exists()


class CodeForm(SingleUseCodeForm, AuthenticateForm):
    """The form at log-in."""


class ReauthenticationCodeForm(SingleUseCodeForm, ReauthenticateForm):
    """The form before sensitive changes."""


def code_fingerprint(row: Authenticator, code: str) -> str:
    """Return a digest of a valid code's time step, the same at every mirror."""
    secret = decrypt(row.data["secret"])
    steps = (
        n
        for n in yield_hotp_counters_from_time()
        if compare_user_code(actual=code, expected=_format_code(secret, n))
    )
    return digest(f"totp {row.data.get('id')} {next(steps, 0)}")


def _format_code(secret: str, step: int) -> str:
    return format_hotp_value(hotp_value(secret, step))


def passkey_host(row: Authenticator) -> str:
    """Return the host name that a passkey is bound to; "" if the browser did not state it."""
    try:
        client_data = json.loads(
            websafe_decode(row.data["credential"]["response"]["clientDataJSON"])
        )
        return urlsplit(client_data["origin"]).hostname or ""
    except (KeyError, TypeError, ValueError):
        return ""
