"""How allauth behaves here.

It sends e-mail by Celery, shows banned people the reason, and lets nobody in before this site has
received what protects their account from the mirror where they set it up. Limits are in
`login_limits`.
"""

import logging
from typing import Any
from urllib.parse import urlsplit

from allauth.account.adapter import DefaultAccountAdapter
from allauth.account.internal.stagekit import clear_login
from allauth.core.exceptions import ImmediateHttpResponse
from django.conf import settings
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from coordinator.accounts import credential_sync, login_limits, sign_up, tasks
from coordinator.replication import mirror_list

log = logging.getLogger("coordinator.accounts")


class AccountAdapter(DefaultAccountAdapter):
    """The adapter that the settings name."""

    error_messages = {
        **DefaultAccountAdapter.error_messages,
        "too_many_login_attempts": (
            "Too many attempts from your network. Sign in with a code by email or a passkey, or "
            "wait five minutes."
        ),
        "password_is_guessed": (
            "Somebody is guessing this account's password, so a password alone is not enough in a "
            "browser that has not signed in before. Sign in with a code by email or a passkey."
        ),
    }

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        """Apply the staff's policy."""
        return sign_up.is_open_for(request)

    def clean_email(self, email: str) -> str:
        """Refuse to sign up addresses of other domains, where the staff allow some only."""
        email = super().clean_email(email)
        request: Any = self.request
        is_sign_up = request.resolver_match and request.resolver_match.url_name == "account_signup"
        if is_sign_up and (problem := sign_up.email_problem(email)):
            raise ValidationError(problem)
        return email

    def _get_login_attempts_cache_key(self, request: HttpRequest, **credentials: Any) -> str:
        """Count wrong passwords by account and source; allauth counts by account alone."""
        key = super()._get_login_attempts_cache_key(request, **credentials)
        return f"{key} {login_limits.login_source(request, credentials.get('email') or '')}"

    def pre_authenticate(self, request: HttpRequest, **credentials: Any) -> None:
        """Refuse guesses of a password, from one source and from many."""
        super().pre_authenticate(request, **credentials)
        if not login_limits.password_suffices(request, credentials.get("email") or ""):
            raise self.validation_error("password_is_guessed")

    def authentication_failed(self, request: HttpRequest, **credentials: Any) -> None:
        """Count a wrong password."""
        login_limits.record_wrong_password(request, credentials.get("email") or "")

    def post_login(self, request: HttpRequest, user: Any, **details: Any) -> HttpResponse:
        """Remember that this person has signed in with this browser."""
        response = super().post_login(request, user, **details)
        login_limits.remember_device(request, response, user)
        return response

    def send_mail(self, template_prefix: str, email: str, context: dict[str, Any]) -> None:
        """Queue an e-mail.

        The time that a mail server takes must not reveal whether an address has an account.
        """
        request: Any = self.request
        signed_in = getattr(request, "user", None) and request.user.is_authenticated
        if not signed_in and not login_limits.may_send_email(request, email):
            log.info("an email to an address that got too many was not sent")
            return
        site = {"name": settings.MIRROR_NAME, "domain": urlsplit(settings.SITE_URL).netloc}
        # Links lead to this site's own address: a stranger's request names any port in its Host.
        origin = request.build_absolute_uri("/").removesuffix("/")
        links = {
            name: f"{settings.SITE_URL}{value.removeprefix(origin)}"
            for name, value in context.items()
            if isinstance(value, str) and value.startswith(f"{origin}/")
        }
        context = {"request": request, "email": email, **context, **links, "current_site": site}
        message = self.render_mail(template_prefix, email, context)
        send_email: Any = tasks.send_email
        send_email.delay(message.subject, message.body, email)

    def format_email_subject(self, subject: str) -> str:
        """Begin every subject with the site's name."""
        return f"{settings.MIRROR_NAME}: {subject}"

    def respond_user_inactive(self, request: HttpRequest, user: Any) -> HttpResponse:
        """Show a banned person, who has typed the right password, the reason."""
        return render(
            request, "account/account_inactive.html", {"reason": user.ban_reason}, status=403
        )

    def pre_login(self, request: HttpRequest, user: Any, **kwargs: Any) -> HttpResponse | None:
        """Refuse people whose credentials have not been received yet."""
        refused = super().pre_login(request, user, **kwargs)
        if refused is None:
            refused = self._refuse_until_complete(request, user)
        return refused

    def login(self, request: HttpRequest, user: Any) -> None:
        """Check once more, as the last step of every log-in: events may have come meanwhile."""
        refused = self._refuse_until_complete(request, user)
        if refused:
            raise ImmediateHttpResponse(refused)
        credential_sync.record_credentials(user.pk)
        super().login(request, user)

    def _refuse_until_complete(self, request: HttpRequest, user: Any) -> HttpResponse | None:
        if not (missing := credential_sync.missing_credentials(user)):
            return None
        clear_login(request)
        context = {"what": missing, "others": mirror_list.other_mirrors()}
        return render(request, "account/account_not_synchronised.html", context, status=503)
