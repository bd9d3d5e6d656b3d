"""Logs, and proofs against their writers, for the staff: looked at. What ends a log is its writer, or an expulsion."""

import json

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html

from coordinator.audit.admin_actions import ReadOnlyAdmin
from coordinator.eventlog.models import ForkProof, Origin
from coordinator.eventlog.projection import state_hash


@admin.register(Origin)
class OriginAdmin(ReadOnlyAdmin):
    list_display = ["id", "short_key", "ours", "head_seq", "cut_seq", "proven", "known"]
    list_filter = ["ours", ("cut_seq", admin.EmptyFieldListFilter)]
    search_fields = ["=id", "key"]
    fields = ["id", "key", "ours", "known", "head_seq", "head_digest", "cut_seq", "why", "events"]
    list_before_template = "admin/state_hash.html"

    def get_queryset(self, request: HttpRequest):
        return super().get_queryset(request).prefetch_related("proofs")

    def changelist_view(
        self, request: HttpRequest, extra_context: dict | None = None
    ) -> HttpResponse:
        return super().changelist_view(
            request, {**(extra_context or {}), "state_hash": state_hash()}
        )

    @admin.display(description="key")
    def short_key(self, origin: Origin) -> str:
        return f"{origin.key[:16]}…"

    @admin.display(description="forked")
    def proven(self, origin: Origin) -> str:
        return "proven" if origin.proofs.all() else "no"

    @admin.display(description="newest events")
    def events(self, origin: Origin) -> str:
        newest = origin.events.order_by("-seq")[:30]
        told = [
            f"{e.seq}  {e.type}  {e.subject}{'' if e.accepted else '  (withdrawn)'}" for e in newest
        ]
        return format_html("<pre>{}</pre>", "\n".join(told))


@admin.register(ForkProof)
class ProofAdmin(ReadOnlyAdmin):
    list_display = ["origin", "seq", "found"]
    list_select_related = ["origin"]
    fields = ["origin", "seq", "found", "one", "other"]

    @admin.display(description="it signed")
    def one(self, proof: ForkProof) -> str:
        return _shown(proof.first)

    @admin.display(description="and it signed")
    def other(self, proof: ForkProof) -> str:
        return _shown(proof.second)


def _shown(signed: dict) -> str:
    told = json.dumps(json.loads(signed["body"]), indent=2, ensure_ascii=False)
    return format_html("<pre>{}\n\n{}</pre>", told, signed["signature"])
