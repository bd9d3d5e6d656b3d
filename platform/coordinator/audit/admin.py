"""The audit log for the staff: searched, never changed."""

import json

from django.conf import settings
from django.contrib import admin
from django.core.cache import cache
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html

from coordinator.audit.admin_actions import ReadOnlyAdmin
from coordinator.audit.models import AuditEntry

KINDS_SECONDS = 300  # that the list of kinds is as good as new: finding it reads the whole log


class KindFilter(admin.SimpleListFilter):
    """Of what kind the subject is, among the kinds that there are."""

    title, parameter_name = "subject's kind", "subject_kind"

    def lookups(self, request: HttpRequest, model_admin: admin.ModelAdmin) -> list[tuple[str, str]]:
        kinds = cache.get_or_set("audit:kinds", self._kinds, KINDS_SECONDS)
        return [(kind, kind) for kind in kinds]

    def queryset(self, request: HttpRequest, queryset: QuerySet) -> QuerySet:
        return queryset.filter(subject_kind=self.value()) if self.value() else queryset

    @staticmethod
    def _kinds() -> list[str]:
        return sorted(
            AuditEntry.objects.order_by().values_list("subject_kind", flat=True).distinct()
        )


@admin.register(AuditEntry)
class EntryAdmin(ReadOnlyAdmin):
    list_display = ["at", "action", "subject", "who", "short_detail"]
    list_filter = [KindFilter, "at"]
    search_fields = [
        "action",
        "subject_name",
        "=subject_id",
        "=request_id",
        "actor__email",
        "actor__name",
    ]
    search_help_text = "An action, a name, an address, or the id of a subject or a request"
    list_select_related = ["actor", "machine"]
    fields = [
        "at",
        "action",
        "subject_kind",
        "subject_name",
        "subject_id",
        "who",
        "whole_detail",
        "request_id",
    ]
    list_before_template = "admin/audit_retention.html"

    def changelist_view(
        self, request: HttpRequest, extra_context: dict | None = None
    ) -> HttpResponse:
        return super().changelist_view(
            request, {**(extra_context or {}), "kept_days": settings.AUDIT_DAYS}
        )

    @admin.display(description="subject")
    def subject(self, entry: AuditEntry) -> str:
        return f"{entry.subject_kind} {entry.subject_name or entry.subject_id}"

    @admin.display(description="by")
    def who(self, entry: AuditEntry) -> str:
        return str(entry.actor or entry.machine or "the site")

    @admin.display(description="detail")
    def short_detail(self, entry: AuditEntry) -> str:
        return ", ".join(f"{name}: {value}" for name, value in entry.detail.items())[:200]

    @admin.display(description="detail")
    def whole_detail(self, entry: AuditEntry) -> str:
        return format_html("<pre>{}</pre>", json.dumps(entry.detail, indent=2, ensure_ascii=False))
