"""The audit log for the staff: searched, never changed."""

import json

from django.conf import settings
from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html

from coordinator.audit.decisions import Looked
from coordinator.audit.models import Entry


@admin.register(Entry)
class EntryAdmin(Looked):
    list_display = ["at", "action", "subject", "who", "short_detail"]
    list_filter = ["subject_kind"]
    search_fields = ["action", "subject_name", "=subject_id", "=request_id", "actor__email", "actor__name"]
    search_help_text = "An action, a name, an address, or the id of a subject or a request"
    list_select_related = ["actor", "machine"]
    date_hierarchy = "at"
    fields = ["at", "action", "subject_kind", "subject_name", "subject_id", "who", "whole_detail", "request_id"]
    show_full_result_count = False  # the log is long
    list_before_template = "admin/audit_kept.html"

    def changelist_view(self, request: HttpRequest, extra_context: dict | None = None) -> HttpResponse:
        return super().changelist_view(request, {**(extra_context or {}), "kept_days": settings.AUDIT_DAYS})

    @admin.display(description="subject")
    def subject(self, entry: Entry) -> str:
        return f"{entry.subject_kind} {entry.subject_name or entry.subject_id}"

    @admin.display(description="by")
    def who(self, entry: Entry) -> str:
        return str(entry.actor or entry.machine or "the site")

    @admin.display(description="detail")
    def short_detail(self, entry: Entry) -> str:
        return ", ".join(f"{name}: {value}" for name, value in entry.detail.items())[:200]

    @admin.display(description="detail")
    def whole_detail(self, entry: Entry) -> str:
        return format_html("<pre>{}</pre>", json.dumps(entry.detail, indent=2, ensure_ascii=False))
