"""How allauth does things here: its letters go out by Celery, and who is banned is told why."""

from allauth.account.adapter import DefaultAccountAdapter
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from coordinator.accounts import tasks


class AccountAdapter(DefaultAccountAdapter):
    def send_mail(self, template_prefix: str, email: str, context: dict) -> None:
        """Queued: how long a mail server takes must say nothing about whether an address is known."""
        site = {"name": settings.MIRROR_NAME, "domain": self.request.get_host()}
        told = {"request": self.request, "email": email, "current_site": site, **context}
        letter = self.render_mail(template_prefix, email, told)
        tasks.post.delay(letter.subject, letter.body, email)

    def format_email_subject(self, subject: str) -> str:
        return f"{settings.MIRROR_NAME}: {subject}"

    def respond_user_inactive(self, request: HttpRequest, user) -> HttpResponse:
        """Reached only by who knows the password."""
        return render(request, "account/account_inactive.html", {"reason": user.ban_reason}, status=403)
