"""The dashboard on the admin's index page, and the fragment that refreshes it."""

from smtplib import SMTPException
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.core.mail import EmailMessage
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from coordinator.accounts.requests import AuthenticatedRequest
from coordinator.staff.dashboard import collect_dashboard


def dashboard_callback(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """Add the dashboard to the context of Unfold's index page."""
    return {**context, "figures": collect_dashboard()}


@require_POST
def send_test_letter(request: AuthenticatedRequest) -> HttpResponse:
    """Send an email to the member of the staff, at once, and show what the mail server answers."""
    letter = EmailMessage(
        f"{settings.MIRROR_NAME}: test letter",
        f"{settings.SITE_URL} sent this email to test its mail settings.",
        to=[request.user.email],
    )
    try:
        letter.send()
    except (OSError, SMTPException) as error:
        messages.error(request, f"The letter was not sent: {error}")
    else:
        messages.success(request, f"The letter went out to {request.user.email}.")
    return redirect("admin:index")


@require_safe
def show_dashboard(request: HttpRequest) -> HttpResponse:
    """Render the dashboard alone, for htmx."""
    return render(request, "admin/dashboard.html", {"figures": collect_dashboard()})
