"""Show the audit log to the staff: searchable, never changed."""

import json
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.core.cache import cache
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html

from coordinator.audit.admin_actions import ReadOnlyAdmin
from coordinator.audit.models import AuditEntry

KINDS_CACHE_SECONDS = 300  # finding the kinds reads the whole log


class SubjectKindFilter(admin.SimpleListFilter):
    """Filter by the kind of subject, among those that occur."""

    title = "subject's kind"
    parameter_name = "subject_kind"

    def lookups(self, request: HttpRequest, model_admin: admin.ModelAdmin) -> list[tuple[str, str]]:
        """Return the kinds that occur."""
        kinds = cache.get_or_set("audit:kinds", self._list_kinds, KINDS_CACHE_SECONDS) or []
        return [(kind, kind) for kind in kinds]

    def queryset(self, request: HttpRequest, queryset: QuerySet) -> QuerySet:
        """Filter by the chosen kind."""
        return queryset.filter(subject_kind=self.value()) if self.value() else queryset

    @staticmethod
    def _list_kinds() -> list[str]:
        return sorted(
            AuditEntry.objects.order_by().values_list("subject_kind", flat=True).distinct()
        )


@admin.register(AuditEntry)
class AuditEntryAdmin(ReadOnlyAdmin):
    """List and search the entries."""

    list_display = ["at", "action", "subject", "who", "short_detail"]
    list_filter = [SubjectKindFilter, "at"]
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
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show above the list how long entries are kept."""
        context = {**(extra_context or {}), "kept_days": settings.AUDIT_DAYS}
        return super().changelist_view(request, context)

    @admin.display(description="subject")
    def subject(self, entry: AuditEntry) -> str:
        """Return the subject's kind and name."""
        return f"{entry.subject_kind} {entry.subject_name or entry.subject_id}"

    @admin.display(description="by")
    def who(self, entry: AuditEntry) -> str:
        """Return who decided."""
        return str(entry.actor or entry.machine or "the site")

    @admin.display(description="detail")
    def short_detail(self, entry: AuditEntry) -> str:
        """Return the beginning of the detail."""
        return ", ".join(f"{name}: {value}" for name, value in entry.detail.items())[:200]

    @admin.display(description="detail")
    def whole_detail(self, entry: AuditEntry) -> str:
        """Return the whole detail as JSON."""
        return format_html("<pre>{}</pre>", json.dumps(entry.detail, indent=2, ensure_ascii=False))
