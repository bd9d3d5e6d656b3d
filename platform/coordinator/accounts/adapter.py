"""How allauth does things here: its letters go out by Celery, who is banned is told why, and nobody is let in before
what protects their account has come from the mirror where they set it up."""

from allauth.account.adapter import DefaultAccountAdapter
from allauth.account.internal.stagekit import clear_login
from allauth.core.exceptions import ImmediateHttpResponse
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from coordinator.accounts import credential_sync, tasks
from coordinator.replication import mirror_list


class AccountAdapter(DefaultAccountAdapter):
    def send_mail(self, template_prefix: str, email: str, context: dict) -> None:
        """Queued: how long a mail server takes must say nothing about whether an address is known."""
        site = {"name": settings.MIRROR_NAME, "domain": self.request.get_host()}
        told = {"request": self.request, "email": email, "current_site": site, **context}
        letter = self.render_mail(template_prefix, email, told)
        tasks.send_email.delay(letter.subject, letter.body, email)

    def format_email_subject(self, subject: str) -> str:
        return f"{settings.MIRROR_NAME}: {subject}"

    def respond_user_inactive(self, request: HttpRequest, user) -> HttpResponse:
        """Reached only by who knows the password."""
        return render(
            request, "account/account_inactive.html", {"reason": user.ban_reason}, status=403
        )

    def pre_login(self, request: HttpRequest, user, **rest) -> HttpResponse | None:
        refused = super().pre_login(request, user, **rest)
        if refused is None:
            credential_sync.record_credentials(user.pk)
            refused = self._not_yet(request, user)
        return refused

    def login(self, request: HttpRequest, user) -> None:
        """The last step of every way in: whatever came meanwhile counts."""
        if refused := self._not_yet(request, user):
            raise ImmediateHttpResponse(refused)
        super().login(request, user)

    def _not_yet(self, request: HttpRequest, user) -> HttpResponse | None:
        if not (what := credential_sync.missing_credentials(user)):
            return None
        clear_login(request)
        told = {"what": what, "others": mirror_list.other_mirrors()}
        return render(request, "account/account_not_synchronised.html", told, status=503)
