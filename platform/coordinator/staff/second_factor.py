"""Let staff into the admin only with a second factor.

A password that was guessed or stolen elsewhere would otherwise be every account of the site.
"""

from collections.abc import Callable
from typing import Any, cast

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

ADMIN_PATH = "/admin/"
# Pages that people use to sign out, or that sign nobody in.
OPEN_PATHS = ("/admin/login/", "/admin/logout/")


class StaffSecondFactorMiddleware:
    """Send staff without a second factor from the admin to the page that sets it up."""

    sync_capable = True
    async_capable = False

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Serve the request, except for the admin's pages to staff without a second factor."""
        is_admin_page = request.path.startswith(ADMIN_PATH) and request.path not in OPEN_PATHS
        user = cast(Any, request.user)
        if is_admin_page and user.is_staff and not user.acts_as_staff:
            messages.warning(
                request,
                "The admin is for staff with a second factor. Add an authenticator app or a "
                "passkey here first.",
            )
            return redirect("mfa_index")
        return self.get_response(request)
