"""Show logs and proofs of forks to the staff, read-only.

A log is truncated by a proof of its writer's fork, or by an expulsion from the mirror list.
"""

import json
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html

from coordinator.audit.admin_actions import ReadOnlyAdmin
from coordinator.eventlog.models import ForkProof, Origin
from coordinator.eventlog.projection import state_hash

NEWEST_EVENTS = 30  # shown of a log


@admin.register(Origin)
class OriginAdmin(ReadOnlyAdmin):
    """List the logs, and the newest events of one."""

    list_display = ["id", "short_key", "ours", "head_seq", "last_valid_seq", "forked", "first_seen"]
    list_filter = ["ours", ("last_valid_seq", admin.EmptyFieldListFilter)]
    search_fields = ["=id", "key"]
    fields = [
        "id",
        "key",
        "ours",
        "first_seen",
        "head_seq",
        "head_digest",
        "last_valid_seq",
        "truncation_reason",
        "events",
    ]
    list_before_template = "admin/state_hash.html"

    def get_queryset(self, request: HttpRequest) -> QuerySet:
        """Load the proofs with the logs."""
        return super().get_queryset(request).prefetch_related("proofs")

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the state hash above the list."""
        context = {**(extra_context or {}), "state_hash": state_hash()}
        return super().changelist_view(request, context)

    @admin.display(description="key")
    def short_key(self, origin: Origin) -> str:
        """Return the beginning of the writer's key."""
        return f"{origin.key[:16]}…"

    @admin.display(description="forked")
    def forked(self, origin: Origin) -> str:
        """Return whether a fork is proven."""
        return "proven" if origin.proofs.all() else "no"

    @admin.display(description="newest events")
    def events(self, origin: Origin) -> str:
        """Return one line for each of the newest events."""
        newest = origin.events.order_by("-seq")[:NEWEST_EVENTS]
        lines = [
            f"{event.seq}  {event.type}  {event.aggregate}"
            f"{'' if event.accepted else '  (withdrawn)'}"
            for event in newest
        ]
        return format_html("<pre>{}</pre>", "\n".join(lines))


@admin.register(ForkProof)
class ForkProofAdmin(ReadOnlyAdmin):
    """List proofs that an origin signed two events with one number."""

    list_display = ["origin", "seq", "found"]
    list_select_related = ["origin"]
    fields = ["origin", "seq", "found", "first_event", "second_event"]

    @admin.display(description="first event")
    def first_event(self, proof: ForkProof) -> str:
        """Return one event with its signature."""
        return _format_signed(proof.first)

    @admin.display(description="second event")
    def second_event(self, proof: ForkProof) -> str:
        """Return the other event with its signature."""
        return _format_signed(proof.second)


def _format_signed(signed: dict[str, str]) -> str:
    text = json.dumps(json.loads(signed["body"]), indent=2, ensure_ascii=False)
    return format_html("<pre>{}\n\n{}</pre>", text, signed["signature"])
