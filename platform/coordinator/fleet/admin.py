"""Machines, the runs they are in, and what was taken out of these, for the staff."""

from typing import Any

from django import forms
from django.contrib import admin
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from unfold.decorators import action
from unfold.enums import ActionVariant
from unfold.forms import BaseDialogForm
from unfold.widgets import (
    UnfoldAdminIntegerFieldWidget,
    UnfoldAdminSelectWidget,
    UnfoldAdminTextInputWidget,
)

from barnraise.errors import SpecError
from coordinator.accounts.models import Machine
from coordinator.audit.admin_actions import ReadOnlyAdmin, ReasonForm, dialog_options
from coordinator.fleet.models import Membership, VerdictRecord
from coordinator.fleet.verdicts import (
    ACTIVE_STATUSES,
    RetractionRequest,
    parse_single_updates,
    retraction_problems,
)

DECIDE = ["decide"]


class BanForm(ReasonForm):
    """With a run, what this machine has done to it is taken out again."""

    membership = forms.ModelChoiceField(
        Membership.objects.none(), required=False, label="Take updates out of", empty_label="Leave them all in",
        widget=UnfoldAdminSelectWidget, help_text="One of the runs under way that it is in.",
    )  # fmt: skip
    first = forms.IntegerField(
        min_value=1, max_value=(1 << 53) - 1, required=False, label="From this update on",
        widget=UnfoldAdminIntegerFieldWidget, help_text="Of its present life there; empty or 1: all, of every life.",
    )  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        under_way = Membership.objects.filter(
            machine=self.object_id, run__status__in=ACTIVE_STATUSES
        ).exclude(incarnation="")
        field = self.fields["membership"]
        field.queryset = under_way.select_related("run", "machine")
        field.label_from_instance = lambda m: (
            f"{m.run.name}: {m.lives.get(m.incarnation, 0)} updates"
        )

    def charges(self) -> list[RetractionRequest]:
        member, first = self.cleaned_data["membership"], self.cleaned_data.get("first") or 1
        lives = [
            member.incarnation,
            *(life for life in member.lives if life != member.incarnation and first == 1),
        ]
        return [RetractionRequest(f"{member.machine.key}.{life}", first) for life in lives]

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean()
        member = cleaned.get("membership")
        if (
            member
            and "first" in cleaned
            and (found := retraction_problems(member.run, self.charges()))
        ):
            self.add_error("first", next(iter(found.values())))
        return cleaned


class VerdictForm(BaseDialogForm):
    """Of a machine's present life in a run."""

    first = forms.IntegerField(
        min_value=1, max_value=(1 << 53) - 1, required=False, label="From this update on",
        widget=UnfoldAdminIntegerFieldWidget, help_text="All of them come out, and nothing more is taken of it.",
    )  # fmt: skip
    updates = forms.CharField(
        max_length=4000, required=False, label="Or single ones", widget=UnfoldAdminTextInputWidget,
        help_text="Numbers, with commas. With its tokens, like 7:40960, one leaves the run's count as well.",
    )  # fmt: skip
    reason = forms.CharField(
        max_length=100,
        label="Why",
        widget=UnfoldAdminTextInputWidget,
        help_text="Everybody may read it.",
    )

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean()
        member = Membership.objects.select_related("run", "machine").get(pk=self.object_id)
        author = f"{member.machine.key}.{member.incarnation}"
        try:
            cleaned["charge"] = RetractionRequest(
                author, cleaned.get("first"), parse_single_updates(cleaned.get("updates") or "")
            )
            found = {} if self.errors else retraction_problems(member.run, [cleaned["charge"]])
        except SpecError as error:
            found = error.problems
        for name, sentence in found.items():
            self.add_error(name if name in self.fields else None, sentence)
        return cleaned


@admin.register(Machine)
class MachineAdmin(ReadOnlyAdmin):
    list_display = ["name", "owner", "system", "accelerator", "enrolled", "last_seen", "revoked"]
    list_filter = [("revoked", admin.EmptyFieldListFilter)]
    ordering = ["-id"]  # as they were enrolled
    search_fields = ["hostname", "key", "owner__email", "owner__name", "=id"]
    list_select_related = ["owner"]
    actions_detail = ["revoke"]

    @action(
        description="Ban this machine",
        permissions=DECIDE,
        variant=ActionVariant.DANGER,
        dialog=dialog_options(
            "Ban this machine",
            "Its tickets die: this site and its peers refuse it, for good.",
            BanForm,
        ),
    )
    def revoke(self, request: HttpRequest, form: BanForm, object_id: str) -> HttpResponse:
        def ban(machine: Machine) -> bool:
            reason = form.cleaned_data["reason"]
            with transaction.atomic():
                changed = machine.revoke(actor=request.user, reason=reason)
                if member := form.cleaned_data["membership"]:
                    why = " ".join(reason.split())[:100]
                    VerdictRecord.issue(member.run, form.charges(), why, actor=request.user)
            return changed or bool(member)

        out = ", and its updates come out" if form.cleaned_data["membership"] else ""
        done = f"{{name}} is revoked: its peers hear of that{out}."
        return self.decide(request, object_id, ban, done, "{name} was revoked before.")


@admin.register(Membership)
class MembershipAdmin(ReadOnlyAdmin):
    list_display = ["machine", "run", "activity", "last_seen", "tokens", "mark"]
    list_filter = ["activity"]
    search_fields = ["machine__hostname", "machine__key", "run__name", "run__slug"]
    list_select_related = ["machine", "run"]
    actions_detail = ["take_out"]

    @action(
        description="Take updates out",
        permissions=DECIDE,
        variant=ActionVariant.DANGER,
        dialog=dialog_options(
            "Take updates out",
            "On every machine of the run, for good. Its own is not banned.",
            VerdictForm,
        ),
    )
    def take_out(self, request: HttpRequest, form: VerdictForm, object_id: str) -> HttpResponse:
        def judge(member: Membership) -> None:
            VerdictRecord.issue(
                member.run,
                [form.cleaned_data["charge"]],
                form.cleaned_data["reason"],
                actor=request.user,
            )

        return self.decide(
            request,
            object_id,
            judge,
            "{name}: signed. Machines hear of it with their next reports.",
        )


@admin.register(VerdictRecord)
class VerdictAdmin(ReadOnlyAdmin):
    list_display = ["run", "given", "by", "proven", "short_digest"]
    search_fields = ["run__name", "run__slug", "=digest"]
    list_select_related = ["run", "by"]
    fields = ["run", "given", "by", "proven", "digest", "body"]

    @admin.display(description="digest")
    def short_digest(self, verdict: VerdictRecord) -> str:
        return f"{verdict.digest[:16]}…"
