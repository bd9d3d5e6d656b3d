"""Machines, their memberships in runs, and verdicts, for the staff."""

from typing import Any

from django import forms
from django.contrib import admin
from django.db import transaction
from unfold.forms import BaseDialogForm
from unfold.widgets import (
    UnfoldAdminIntegerFieldWidget,
    UnfoldAdminSelectWidget,
    UnfoldAdminTextInputWidget,
)

from barnraise.errors import SpecError
from coordinator.accounts.models import Machine, User
from coordinator.audit.admin_actions import ReadOnlyAdmin, ReasonForm, decision
from coordinator.fleet.models import Membership, VerdictRecord
from coordinator.fleet.verdict_requests import (
    ACTIVE_STATUSES,
    MAX_UPDATE_NUMBER,
    RetractionRequest,
    parse_single_updates,
    retraction_problems,
)


def _first_update_field(help_text: str) -> forms.IntegerField:
    return forms.IntegerField(
        min_value=1,
        max_value=MAX_UPDATE_NUMBER,
        required=False,
        label="From update",
        widget=UnfoldAdminIntegerFieldWidget,
        help_text=help_text,
    )


class BanForm(ReasonForm):
    """Ask for the reason, and for a run from which to remove the machine's updates."""

    membership = forms.ModelChoiceField(
        Membership.objects.none(),
        required=False,
        label="Remove updates from",
        empty_label="No run",
        widget=UnfoldAdminSelectWidget,
        help_text="An active run of this machine.",
    )
    first = _first_update_field(
        "Removal starts at this number. Empty or 1 removes all, also those of earlier incarnations."
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        active = Membership.objects.filter(
            machine=self.object_id, run__status__in=ACTIVE_STATUSES
        ).exclude(incarnation="")
        field: Any = self.fields["membership"]
        field.queryset = active.select_related("run", "machine")
        field.label_from_instance = lambda m: (
            f"{m.run.name}: {m.updates_by_incarnation.get(m.incarnation, 0)} updates"
        )

    @property
    def removal(self) -> str:
        """The part of the message about the machine's updates; "" if they stay."""
        return " and its updates are removed" if self.cleaned_data["membership"] else ""

    def retraction_requests(self) -> list[RetractionRequest]:
        """Return what to retract, one request for each incarnation."""
        member = self.cleaned_data["membership"]
        first = self.cleaned_data.get("first") or 1
        earlier = [
            incarnation
            for incarnation in member.updates_by_incarnation
            if incarnation != member.incarnation and first == 1
        ]
        return [
            RetractionRequest(f"{member.machine.key}.{incarnation}", first)
            for incarnation in (member.incarnation, *earlier)
        ]

    def clean(self) -> dict[str, Any]:
        """Check that the updates can be retracted."""
        cleaned = super().clean() or {}
        member = cleaned.get("membership")
        if member and "first" in cleaned:
            problems = retraction_problems(member.run, self.retraction_requests())
            if problems:
                self.add_error("first", next(iter(problems.values())))
        return cleaned


class VerdictForm(BaseDialogForm):
    """Ask which updates of a machine's present incarnation to remove from a run."""

    first = _first_update_field(
        "All updates from this number on are removed, and no new ones accepted."
    )
    updates = forms.CharField(
        max_length=4000,
        required=False,
        label="Single updates",
        widget=UnfoldAdminTextInputWidget,
        help_text="Numbers, separated by commas. Write 7:40960 to subtract the 40,960 tokens of "
        "update 7 from the run's count too.",
    )
    reason = forms.CharField(
        max_length=100,
        label="Reason",
        widget=UnfoldAdminTextInputWidget,
        help_text="Everybody can read it.",
    )

    def clean(self) -> dict[str, Any]:
        """Check that the updates can be retracted."""
        cleaned = super().clean() or {}
        member = Membership.objects.select_related("run", "machine").get(pk=self.object_id)
        author = f"{member.machine.key}.{member.incarnation}"
        try:
            cleaned["request"] = RetractionRequest(
                author, cleaned.get("first"), parse_single_updates(cleaned.get("updates") or "")
            )
            problems = {} if self.errors else retraction_problems(member.run, [cleaned["request"]])
        except SpecError as error:
            problems = error.problems
        for name, sentence in problems.items():
            self.add_error(name if name in self.fields else None, sentence)
        return cleaned


@admin.register(Machine)
class MachineAdmin(ReadOnlyAdmin):
    """Machines, which the staff may ban."""

    list_display = ["name", "owner", "system", "accelerator", "enrolled", "last_seen", "revoked"]
    list_filter = [("revoked", admin.EmptyFieldListFilter)]
    ordering = ["-id"]  # the most recently enrolled first
    search_fields = ["hostname", "key", "owner__email", "owner__name", "=id"]
    list_select_related = ["owner"]
    actions_detail = ["revoke", "reinstate"]

    @decision(
        "Reinstate this machine",
        "This site accepts its key again.",
        done="{name} may take part again.",
        otherwise="{name} is not banned.",
    )
    def reinstate(self, machine: Machine, actor: User, form: forms.Form) -> bool:
        """End this site's revocation of the machine's key."""
        return machine.reinstate(actor=actor)

    @decision(
        "Ban this machine",
        "Its key is revoked: this site and its peers refuse it until the staff reinstate it.",
        BanForm,
        done="{name} is banned{form.removal}. Its peers are informed.",
        otherwise="{name} was banned before.",
        danger=True,
    )
    def revoke(self, machine: Machine, actor: User, form: BanForm) -> bool:
        """Revoke the machine's key and, if asked to, retract its updates from a run."""
        member, reason = form.cleaned_data["membership"], form.cleaned_data["reason"]
        with transaction.atomic():
            changed = machine.revoke(actor=actor, reason=reason)
            if member:
                public_reason = " ".join(reason.split())[:100]
                requests = form.retraction_requests()
                VerdictRecord.issue(member.run, requests, public_reason, actor=actor)
        return changed or bool(member)


@admin.register(Membership)
class MembershipAdmin(ReadOnlyAdmin):
    """Machines in runs, whose updates the staff may remove."""

    list_display = ["machine", "run", "activity", "last_seen", "tokens", "high_water_mark"]
    list_filter = ["activity"]
    search_fields = ["machine__hostname", "machine__key", "run__name", "run__slug"]
    list_select_related = ["machine", "run"]
    actions_detail = ["remove_updates"]
    moments = ("changed", "planned")

    @decision(
        "Remove updates",
        "Permanently, on every machine of the run. The machine itself is not banned.",
        VerdictForm,
        done="{name}: signed. Machines receive the verdict with their next reports.",
        danger=True,
    )
    def remove_updates(self, member: Membership, actor: User, form: VerdictForm) -> None:
        """Issue a verdict."""
        request, reason = form.cleaned_data["request"], form.cleaned_data["reason"]
        VerdictRecord.issue(member.run, [request], reason, actor=actor)


@admin.register(VerdictRecord)
class VerdictAdmin(ReadOnlyAdmin):
    """Signed verdicts."""

    list_display = ["run", "given", "by", "proven", "short_digest"]
    search_fields = ["run__name", "run__slug", "=digest"]
    list_select_related = ["run", "by"]
    fields = ["run", "given", "by", "proven", "digest", "body"]

    @admin.display(description="digest")
    def short_digest(self, verdict: VerdictRecord) -> str:
        """Return the first characters of the digest."""
        return f"{verdict.digest[:16]}…"
