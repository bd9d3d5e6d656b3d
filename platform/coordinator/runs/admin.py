"""Runs for the staff: looked at in full, moved only through the same methods as everywhere else."""

from django import forms
from django.contrib import admin, messages
from django.http import HttpRequest, HttpResponse
from unfold.decorators import action
from unfold.enums import ActionVariant
from unfold.forms import BaseDialogForm
from unfold.widgets import UnfoldAdminIntegerFieldWidget

from coordinator.audit.admin_actions import ReadOnlyAdmin, dialog_options
from coordinator.runs.models import MAX_TOKEN_BUDGET, Run

DECIDE = ["decide"]
WORDS = {"pause": "Paused", "resume": "Resumed", "finish": "Finished", "cancel": "Cancelled"}


class TokensForm(BaseDialogForm):
    tokens = forms.IntegerField(
        min_value=1,
        max_value=MAX_TOKEN_BUDGET,
        label="Tokens more",
        widget=UnfoldAdminIntegerFieldWidget,
    )

    def clean_tokens(self) -> int:
        tokens = self.cleaned_data["tokens"]
        if sentence := Run.objects.get(pk=self.object_id).extension_problem(tokens):
            raise forms.ValidationError(sentence)
        return tokens


@admin.register(Run)
class RunAdmin(ReadOnlyAdmin):
    list_display = ["name", "owner", "status", "ledger_tokens", "created"]
    list_filter = ["status"]
    search_fields = ["name", "slug", "owner__email", "owner__name", "=id"]
    list_select_related = ["owner"]
    actions = ["pause_all", "resume_all", "finish_all", "cancel_all"]
    actions_detail = ["pause", "resume", "extend", "finish", "cancel"]

    @action(
        description="Pause",
        permissions=DECIDE,
        dialog=dialog_options("Pause", "Workers keep their state and take no steps."),
    )
    def pause(self, request: HttpRequest, form, object_id: str) -> HttpResponse:
        return self._control(request, object_id, "pause")

    @action(
        description="Resume",
        permissions=DECIDE,
        dialog=dialog_options("Resume", "Training goes on."),
    )
    def resume(self, request: HttpRequest, form, object_id: str) -> HttpResponse:
        return self._control(request, object_id, "resume")

    @action(
        description="Extend the budget",
        permissions=DECIDE,
        dialog=dialog_options(
            "Extend the budget",
            "While it is under way and has tokens left. Its rules stay: the rest is trained at the last rate.",
            TokensForm,
        ),
    )
    def extend(self, request: HttpRequest, form, object_id: str) -> HttpResponse:
        tokens = form.cleaned_data["tokens"]
        return self.decide(
            request,
            object_id,
            lambda run: run.extend(tokens, actor=request.user),
            f"{{name}} has {tokens:,} tokens more.",
        )

    @action(
        description="Finish now",
        permissions=DECIDE,
        variant=ActionVariant.DANGER,
        dialog=dialog_options(
            "Finish now", "Whatever the budget says, for good. Workers settle and keep the model."
        ),
    )
    def finish(self, request: HttpRequest, form, object_id: str) -> HttpResponse:
        return self._control(request, object_id, "finish")

    @action(
        description="Cancel the run",
        permissions=DECIDE,
        variant=ActionVariant.DANGER,
        dialog=dialog_options("Cancel the run", "For good. Workers stop."),
    )
    def cancel(self, request: HttpRequest, form, object_id: str) -> HttpResponse:
        return self._control(request, object_id, "cancel")

    def _control(self, request: HttpRequest, pk: str, word: str) -> HttpResponse:
        def act(run: Run) -> bool:
            return getattr(run, word)(actor=request.user)

        return self.decide(
            request, pk, act, f"{WORDS[word]}: {{name}}.", f"Nothing to {word} in {{name}} now."
        )

    @admin.action(
        description="Pause: workers keep their state and take no steps", permissions=DECIDE
    )
    def pause_all(self, request: HttpRequest, queryset) -> None:
        self._move(request, queryset, "pause")

    @admin.action(description="Resume", permissions=DECIDE)
    def resume_all(self, request: HttpRequest, queryset) -> None:
        self._move(request, queryset, "resume")

    @admin.action(description="Finish now, whatever the budget says", permissions=DECIDE)
    def finish_all(self, request: HttpRequest, queryset) -> None:
        self._move(request, queryset, "finish")

    @admin.action(description="Cancel", permissions=DECIDE)
    def cancel_all(self, request: HttpRequest, queryset) -> None:
        self._move(request, queryset, "cancel")

    def _move(self, request: HttpRequest, queryset, word: str) -> None:
        for run in queryset:
            if getattr(run, word)(actor=request.user):
                self.message_user(request, f"{WORDS[word]}: {run.name}.", messages.SUCCESS)
            else:
                self.message_user(
                    request,
                    f"{run.name} is {run.status}: there is nothing to {word}.",
                    messages.ERROR,
                )
