"""Let staff into the admin only with a second factor.

A password that was guessed or stolen elsewhere would otherwise be every account of the site.
"""

from typing import Any, cast

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from coordinator.lib.middleware import GetResponse, sync_middleware

ADMIN_PATH = "/admin/"
# Pages that people use to sign out, or that sign nobody in.
OPEN_PATHS = ("/admin/login/", "/admin/logout/")


@sync_middleware
def require_second_factor(request: HttpRequest, get_response: GetResponse) -> HttpResponse:
    """Send staff without a second factor from the admin to the page that sets it up."""
    is_admin_page = request.path.startswith(ADMIN_PATH) and request.path not in OPEN_PATHS
    user = cast(Any, request.user)
    if is_admin_page and user.is_staff and not user.acts_as_staff:
        messages.warning(
            request,
            "The admin is for staff with a second factor. Add an authenticator app or a "
            "passkey here first.",
        )
        return redirect("mfa_index")
    return get_response(request)
