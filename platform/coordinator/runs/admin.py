"""Runs for the staff: looked at in full, moved only through the same methods as everywhere else."""

from django.contrib import admin, messages
from unfold.admin import ModelAdmin

from coordinator.runs.models import Run

STATE = ["status", "launch_requested", "ledger_tokens", "created", "launched", "started", "finished"]
WORDS = {"pause": "Paused", "resume": "Resumed", "finish": "Finished", "cancel": "Cancelled"}


@admin.register(Run)
class RunAdmin(ModelAdmin):
    list_display = ["name", "owner", "status", "ledger_tokens", "created"]
    list_filter = ["status"]
    search_fields = ["name", "slug", "owner__email"]
    list_select_related = ["owner"]
    actions = ["pause", "resume", "finish", "cancel"]
    fields = ["name", "quorum", "report_every", "id", "slug", "owner", *STATE, "spec_digest", "spec_text", "manifest"]
    readonly_fields = ["id", "slug", "owner", *STATE, "spec_digest", "spec_text", "manifest"]

    def save_model(self, request, obj, form, change) -> None:
        """Only what was typed: the copy in hand may be older than the run's status."""
        Run.objects.filter(pk=obj.pk).update(**{name: getattr(obj, name) for name in form.changed_data})

    def has_add_permission(self, request) -> bool:
        return False  # runs are made on the site, where their fields are checked

    @admin.action(description="Pause: workers keep their state and take no steps", permissions=["change"])
    def pause(self, request, queryset) -> None:
        self._move(request, queryset, "pause")

    @admin.action(description="Resume", permissions=["change"])
    def resume(self, request, queryset) -> None:
        self._move(request, queryset, "resume")

    @admin.action(description="Finish now, whatever the budget says", permissions=["change"])
    def finish(self, request, queryset) -> None:
        self._move(request, queryset, "finish")

    @admin.action(description="Cancel", permissions=["change"])
    def cancel(self, request, queryset) -> None:
        self._move(request, queryset, "cancel")

    def _move(self, request, queryset, action: str) -> None:
        for run in queryset:
            if getattr(run, action)():
                self.message_user(request, f"{WORDS[action]}: {run.name}.", messages.SUCCESS)
            else:
                self.message_user(request, f"{run.name} is {run.status}: there is nothing to {action}.", messages.ERROR)
