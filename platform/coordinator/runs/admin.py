"""Runs for the staff: read-only, and changed only by the model's own methods."""

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from unfold.forms import BaseDialogForm
from unfold.widgets import UnfoldAdminIntegerFieldWidget

from coordinator.audit.admin_actions import ReadOnlyAdmin, decision
from coordinator.runs.models import MAX_TOKEN_BUDGET, Run

PAST_TENSE = {"pause": "Paused", "resume": "Resumed", "finish": "Finished", "cancel": "Cancelled"}


class TokensForm(BaseDialogForm):
    """Ask for tokens to add to a budget."""

    tokens = forms.IntegerField(
        min_value=1,
        max_value=MAX_TOKEN_BUDGET,
        label="Additional tokens",
        widget=UnfoldAdminIntegerFieldWidget,
    )

    def clean_tokens(self) -> int:
        """Check that the budget can grow by so many."""
        tokens = self.cleaned_data["tokens"]
        problem = Run.objects.get(pk=self.object_id).extension_problem(tokens)
        if problem:
            raise forms.ValidationError(problem)
        return tokens


@admin.register(Run)
class RunAdmin(ReadOnlyAdmin):
    """Runs, which the staff may control as their owners do."""

    list_display = ["name", "owner", "status", "ledger_tokens", "created"]
    list_filter = ["status"]
    search_fields = ["name", "slug", "owner__email", "owner__name", "=id"]
    list_select_related = ["owner"]
    actions = ["pause_all", "resume_all", "finish_all", "cancel_all"]
    actions_detail = ["pause", "resume", "extend", "finish", "cancel"]

    @decision("Pause", "Workers keep their state and take no steps.")
    def pause(self, request: HttpRequest, form: forms.Form, object_id: str) -> HttpResponse:
        """Pause the run."""
        return self._control(request, object_id, "pause")

    @decision("Resume", "Training continues.")
    def resume(self, request: HttpRequest, form: forms.Form, object_id: str) -> HttpResponse:
        """Resume the run."""
        return self._control(request, object_id, "resume")

    @decision(
        "Extend the budget",
        "Only while the run is active and has tokens left. The spec stays as it is: training "
        "continues at the last learning rate.",
        TokensForm,
    )
    def extend(self, request: HttpRequest, form: TokensForm, object_id: str) -> HttpResponse:
        """Add tokens to the budget."""
        tokens = form.cleaned_data["tokens"]
        return self.decide(
            request,
            object_id,
            lambda run: run.extend(tokens, actor=request.user),
            f"{{name}} has {tokens:,} more tokens.",
        )

    @decision(
        "Finish now", "Permanently, whatever the budget is. Workers save the model.", danger=True
    )
    def finish(self, request: HttpRequest, form: forms.Form, object_id: str) -> HttpResponse:
        """Finish the run."""
        return self._control(request, object_id, "finish")

    @decision("Cancel the run", "Permanently. Workers stop.", danger=True)
    def cancel(self, request: HttpRequest, form: forms.Form, object_id: str) -> HttpResponse:
        """Cancel the run."""
        return self._control(request, object_id, "cancel")

    def _control(self, request: HttpRequest, pk: str, action: str) -> HttpResponse:
        def act(run: Run) -> bool:
            return getattr(run, action)(actor=request.user)

        done = f"{PAST_TENSE[action]}: {{name}}."
        return self.decide(request, pk, act, done, f"Nothing to {action} in {{name}} now.")

    @admin.action(description="Pause", permissions=["decide"])
    def pause_all(self, request: HttpRequest, queryset: QuerySet[Run]) -> None:
        """Pause the selected runs."""
        self._control_all(request, queryset, "pause")

    @admin.action(description="Resume", permissions=["decide"])
    def resume_all(self, request: HttpRequest, queryset: QuerySet[Run]) -> None:
        """Resume the selected runs."""
        self._control_all(request, queryset, "resume")

    @admin.action(description="Finish now, whatever the budget", permissions=["decide"])
    def finish_all(self, request: HttpRequest, queryset: QuerySet[Run]) -> None:
        """Finish the selected runs."""
        self._control_all(request, queryset, "finish")

    @admin.action(description="Cancel", permissions=["decide"])
    def cancel_all(self, request: HttpRequest, queryset: QuerySet[Run]) -> None:
        """Cancel the selected runs."""
        self._control_all(request, queryset, "cancel")

    def _control_all(self, request: HttpRequest, queryset: QuerySet[Run], action: str) -> None:
        for run in queryset:
            control: Any = getattr(run, action)
            if control(actor=request.user):
                text, level = f"{PAST_TENSE[action]}: {run.name}.", messages.SUCCESS
            else:
                text = f"{run.name} is {run.status}: there is nothing to {action}."
                level = messages.ERROR
            self.message_user(request, text, level)
