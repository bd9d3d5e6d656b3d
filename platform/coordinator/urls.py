"""Every address of the site."""

from allauth.account.decorators import secure_admin_login
from django.contrib import admin
from django.urls import include, path

from coordinator import health, outages
from coordinator.api.routes import api
from coordinator.staff.views import live_figures

handler400 = "coordinator.outages.bad_request"
handler403 = "coordinator.outages.forbidden"
handler404 = "coordinator.outages.not_found"
handler500 = "coordinator.outages.server_error"

admin.site.login = secure_admin_login(
    admin.site.login
)  # the same door as for everybody, second factor and all

urlpatterns = [
    path("healthz", health.healthz, name="healthz"),
    path("readyz", health.readyz, name="readyz"),
    path("metrics", health.metrics_page, name="metrics"),
    path("status", health.status, name="status"),
    path("admin/figures/", admin.site.admin_view(live_figures), name="admin_figures"),
    path(
        "admin/r/<path:rest>", outages.nothing
    ),  # Django's detour to "view on site", which takes any text for a key
    path("admin/", admin.site.urls),
    path("accounts/", include("coordinator.accounts.urls")),
    path("api/v1/", api.urls),
    path("", include("coordinator.live.urls")),
    path("", include("coordinator.web.urls")),
]
