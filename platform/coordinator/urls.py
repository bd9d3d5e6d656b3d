"""Route every address of the site."""

from allauth.account.decorators import secure_admin_login
from django.contrib import admin
from django.urls import include, path

from coordinator.api.ninja_api import api
from coordinator.ops import error_pages, health
from coordinator.staff.views import send_test_letter, show_dashboard

handler400 = "coordinator.ops.error_pages.bad_request"
handler403 = "coordinator.ops.error_pages.forbidden"
handler404 = "coordinator.ops.error_pages.not_found"
handler500 = "coordinator.ops.error_pages.server_error"

# The admin uses the site's own login, including the second factor.
admin.site.login = secure_admin_login(admin.site.login)  # pyright: ignore[reportAttributeAccessIssue] - allauth's documented way

urlpatterns = [
    path("healthz", health.healthz, name="healthz"),
    path("readyz", health.readyz, name="readyz"),
    path("metrics", health.metrics, name="metrics"),
    path("status", health.status, name="status"),
    path("admin/figures/", admin.site.admin_view(show_dashboard), name="admin_figures"),
    path("admin/test-letter/", admin.site.admin_view(send_test_letter), name="admin_test_letter"),
    # Django's redirect "view on site" accepts any text as a key.
    path("admin/r/<path:rest>", error_pages.always_not_found),
    path("admin/", admin.site.urls),
    path("accounts/", include("coordinator.accounts.urls")),
    path("api/v1/", api.urls),
    path("", include("coordinator.live.urls")),
    path("", include("coordinator.web.urls")),
]
