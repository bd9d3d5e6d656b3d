"""Runs for the staff: read-only, and changed only by the model's own methods."""

from collections.abc import Callable
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


def _control_action(
    name: str, title: str, consequence: str, danger: bool = False
) -> Callable[..., HttpResponse]:
    """Build the admin action that calls the method `name` of a run."""

    def control(self: ReadOnlyAdmin, run: Run, actor: Any, form: forms.Form) -> bool:
        return getattr(run, name)(actor=actor)

    control.__name__ = name
    done, otherwise = f"{PAST_TENSE[name]}: {{name}}.", f"Nothing to {name} in {{name}} now."
    return decision(title, consequence, done=done, otherwise=otherwise, danger=danger)(control)


def _control_all_action(name: str, title: str) -> Callable[..., None]:
    """Build the action of the list that calls the method `name` of the selected runs."""

    def control_all(self: ReadOnlyAdmin, request: HttpRequest, queryset: QuerySet[Run]) -> None:
        for run in queryset:
            if getattr(run, name)(actor=request.user):
                text, level = f"{PAST_TENSE[name]}: {run.name}.", messages.SUCCESS
            else:
                text = f"{run.name} is {run.status}: there is nothing to {name}."
                level = messages.ERROR
            self.message_user(request, text, level)

    control_all.__name__ = f"{name}_all"
    return admin.action(description=title, permissions=["decide"])(control_all)


@admin.register(Run)
class RunAdmin(ReadOnlyAdmin):
    """Runs, which the staff may control as their owners do."""

    list_display = ["name", "owner", "status", "ledger_tokens", "created"]
    list_filter = ["status"]
    search_fields = ["name", "slug", "owner__email", "owner__name", "=id"]
    list_select_related = ["owner"]
    actions = ["pause_all", "resume_all", "finish_all", "cancel_all"]
    actions_detail = ["pause", "resume", "extend", "finish", "cancel"]

    pause = _control_action("pause", "Pause", "Workers keep their state and take no steps.")
    resume = _control_action("resume", "Resume", "Training continues.")
    finish = _control_action(
        "finish",
        "Finish now",
        "Permanently, whatever the budget is. Workers save the model.",
        danger=True,
    )
    cancel = _control_action("cancel", "Cancel the run", "Permanently. Workers stop.", danger=True)
    pause_all = _control_all_action("pause", "Pause")
    resume_all = _control_all_action("resume", "Resume")
    finish_all = _control_all_action("finish", "Finish now, whatever the budget")
    cancel_all = _control_all_action("cancel", "Cancel")

    @decision(
        "Extend the budget",
        "Only while the run is active and has tokens left. The spec stays as it is: training "
        "continues at the last learning rate.",
        TokensForm,
        done="{name} has {form.cleaned_data[tokens]:,} more tokens.",
    )
    def extend(self, run: Run, actor: Any, form: TokensForm) -> None:
        """Add tokens to the budget."""
        run.extend(form.cleaned_data["tokens"], actor=actor)
