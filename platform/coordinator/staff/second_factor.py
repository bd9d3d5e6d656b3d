"""Let staff into the admin only with a second factor.

A password that was guessed or stolen elsewhere would otherwise be every account of the site.
"""

from collections.abc import Callable

from allauth.mfa.models import Authenticator
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

ADMIN_PATH = "/admin/"
# Pages that people use to sign out, or that sign nobody in.
OPEN_PATHS = ("/admin/login/", "/admin/logout/")


def has_second_factor(user: object) -> bool:
    """Return whether a log-in of this person asks for more than the password."""
    factors = (Authenticator.Type.TOTP, Authenticator.Type.WEBAUTHN)
    return Authenticator.objects.filter(user=user, type__in=factors).exists()


class StaffSecondFactorMiddleware:
    """Send staff without a second factor from the admin to the page that sets it up."""

    sync_capable = True
    async_capable = False

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Serve the request, except for the admin's pages to staff without a second factor."""
        is_admin_page = request.path.startswith(ADMIN_PATH) and request.path not in OPEN_PATHS
        if is_admin_page and request.user.is_staff and not has_second_factor(request.user):
            messages.warning(
                request,
                "The admin is for staff with a second factor. Add an authenticator app or a "
                "passkey here first.",
            )
            return redirect("mfa_index")
        return self.get_response(request)
