"""Second factors at the door: a code works once, at one mirror; a passkey works at the site where it was made."""

import json
from functools import cached_property
from typing import Any
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
    """Of a form that asks for a code: the step of an app's code is used up, here and at the other mirrors."""

    user: Any
    authenticator: Authenticator

    def clean_code(self) -> str:
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
        """The sites where theirs were made."""
        rows = Authenticator.objects.filter(user=self.user, type=Authenticator.Type.WEBAUTHN)
        return {site for row in rows if (site := passkey_host(row))}

    @property
    def passkey_here(self) -> bool:
        return context.request.get_host().partition(":")[0] in self.passkeys

    @property
    def passkeys_elsewhere(self) -> list[str]:
        return [] if self.passkey_here else sorted(self.passkeys)

    @cached_property
    def app(self) -> bool:
        """Whether they have one that makes codes."""
        return Authenticator.objects.filter(user=self.user, type=Authenticator.Type.TOTP).exists()


class CodeForm(SingleUseCodeForm, AuthenticateForm):
    pass


class ReauthenticationCodeForm(SingleUseCodeForm, ReauthenticateForm):
    pass


def code_fingerprint(row: Authenticator, code: str) -> str:
    """Of a code that is right, the same at every mirror."""
    secret = decrypt(row.data["secret"])
    steps = (
        n
        for n in yield_hotp_counters_from_time()
        if compare_user_code(actual=code, expected=_shown(secret, n))
    )
    return digest(f"totp {row.data.get('id')} {next(steps, 0)}")


def _shown(secret: str, step: int) -> str:
    return format_hotp_value(hotp_value(secret, step))


def passkey_host(row: Authenticator) -> str:
    """The host name that a passkey is bound to, as the browser wrote it down; "" where it did not."""
    try:
        told = json.loads(websafe_decode(row.data["credential"]["response"]["clientDataJSON"]))
        return urlsplit(told["origin"]).hostname or ""
    except (KeyError, TypeError, ValueError):
        return ""
