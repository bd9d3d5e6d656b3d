"""allauth's pages.

Where addresses or second factors change, the change and its events are one transaction, which takes
the log's lock before any row's lock.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from allauth.account import views as account
from allauth.mfa.base import views as mfa
from allauth.mfa.recovery_codes import views as codes
from allauth.mfa.totp import views as totp
from allauth.mfa.webauthn import views as passkeys
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import include, path

from coordinator.eventlog.writer import log_transaction

View = Callable[..., HttpResponseBase]


def atomic_post(view: View) -> View:
    """Run a POST of this view in one log transaction."""

    @wraps(view)
    def in_transaction(request: HttpRequest, *args: Any, **named: Any) -> HttpResponseBase:
        if request.method != "POST":
            return view(request, *args, **named)
        with log_transaction():
            return view(request, *args, **named)

    return in_transaction


urlpatterns = [
    path("email/", atomic_post(account.email), name="account_email"),
    path(
        "confirm-email/",
        atomic_post(account.email_verification_sent),
        name="account_email_verification_sent",
    ),
    path("2fa/authenticate/", atomic_post(mfa.authenticate), name="mfa_authenticate"),
    path("2fa/reauthenticate/", atomic_post(mfa.reauthenticate), name="mfa_reauthenticate"),
    path("2fa/totp/activate/", atomic_post(totp.activate_totp), name="mfa_activate_totp"),
    path("2fa/totp/deactivate/", atomic_post(totp.deactivate_totp), name="mfa_deactivate_totp"),
    path(
        "2fa/recovery-codes/generate/",
        atomic_post(codes.generate_recovery_codes),
        name="mfa_generate_recovery_codes",
    ),
    path("2fa/webauthn/add/", atomic_post(passkeys.add_webauthn), name="mfa_add_webauthn"),
    path(
        "2fa/webauthn/keys/<int:pk>/remove/",
        atomic_post(passkeys.remove_webauthn),
        name="mfa_remove_webauthn",
    ),
    path(
        "2fa/webauthn/keys/<int:pk>/edit/",
        atomic_post(passkeys.edit_webauthn),
        name="mfa_edit_webauthn",
    ),
    path(
        "login/code/confirm/",
        atomic_post(account.confirm_login_code),
        name="account_confirm_login_code",
    ),
    path("", include("allauth.urls")),
]
