"""People, teams and enrolments for the staff. Machines are with the runs they are in (`fleet/admin.py`)."""

from importlib import import_module

from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.usersessions.models import UserSession
from django.contrib import admin
from django.contrib.auth.models import Group
from django.http import HttpRequest, HttpResponse
from unfold.admin import ModelAdmin
from unfold.decorators import action
from unfold.enums import ActionVariant

from coordinator.accounts.deletion import delete_account
from coordinator.accounts.models import Enrolment, SiteSettings, Team, User
from coordinator.audit.admin_actions import ReadOnlyAdmin, ReasonForm, dialog_options

for app in ("django.contrib.auth", "allauth.account", "allauth.mfa", "allauth.usersessions"):
    import_module(f"{app}.admin")  # registers what the next line takes out again
admin.site.unregister(
    [Group, EmailAddress, Authenticator, UserSession]
)  # addresses and secrets are their owner's alone

DECIDE = ["decide"]
RIGHTS = (  # (dialog, right, given, its title, what follows of it)
    ("make_organiser", "organiser", True, "Make organiser", "They may create runs, whatever the site's rules say."),
    ("unmake_organiser", "organiser", False, "No organiser any more",
     "Their runs stay theirs. New ones are up to the site's rules."),
    ("make_staff", "is_staff", True, "Make staff", "They may use this panel: see every address, ban people, end runs."),
    ("unmake_staff", "is_staff", False, "No staff any more", "This panel is closed to them."),
)  # fmt: skip


def grants(name: str, right: str, given: bool, title: str, follows: str):
    """A dialog that gives a right, or takes it."""

    def grant(self, request: HttpRequest, form, object_id: str) -> HttpResponse:
        done, otherwise = "Done: {name}.", "{name}: it is so already."
        return self.decide(
            request, object_id, lambda user: user.grant(right, request.user, given), done, otherwise
        )

    grant.__name__ = name  # its address
    return action(
        description=title.removesuffix(" any more"),
        permissions=DECIDE,
        dialog=dialog_options(title, follows),
    )(grant)


@admin.register(User)
class UserAdmin(ReadOnlyAdmin):
    list_display = ["email", "name", "is_staff", "organiser", "is_active", "date_joined"]
    list_filter = ["is_staff", "organiser", "is_active", ("banned", admin.EmptyFieldListFilter)]
    search_fields = ["email", "name", "=id"]
    ordering = ["-id"]  # as they came
    fields = ["email", "name", "id", "role", "in_teams", "is_superuser", "date_joined", "last_login", "banned",
              "ban_reason", "left"]  # fmt: skip
    actions_detail = [
        "make_organiser", "unmake_organiser", "ban", "unban",
        {"title": "More", "items": ["make_staff", "unmake_staff", "erase"]},
    ]  # fmt: skip

    make_organiser, unmake_organiser, make_staff, unmake_staff = (grants(*each) for each in RIGHTS)

    def get_queryset(self, request: HttpRequest):
        return super().get_queryset(request).prefetch_related("teams")

    @admin.display(description="teams")
    def in_teams(self, user: User) -> str:
        return ", ".join(team.name for team in user.teams.all()) or "none"

    @action(
        description="Ban",
        permissions=DECIDE,
        variant=ActionVariant.DANGER,
        dialog=dialog_options(
            "Ban", "They cannot sign in, and all their machines are revoked for good.", ReasonForm
        ),
    )
    def ban(self, request: HttpRequest, form, object_id: str) -> HttpResponse:
        reason = form.cleaned_data["reason"]
        return self.decide(
            request,
            object_id,
            lambda user: user.ban(request.user, reason),
            "{name} is banned.",
            "{name} was banned.",
        )

    @action(
        description="Lift the ban",
        permissions=DECIDE,
        dialog=dialog_options(
            "Lift the ban", "They may sign in again. Their machines enrol anew, with new keys."
        ),
    )
    def unban(self, request: HttpRequest, form, object_id: str) -> HttpResponse:
        return self.decide(
            request,
            object_id,
            lambda user: user.unban(request.user),
            "{name} may come back.",
            "{name} is not banned.",
        )

    @action(
        description="Delete the account",
        permissions=DECIDE,
        variant=ActionVariant.DANGER,
        dialog=dialog_options(
            "Delete the account",
            "As if they had done it themselves: what is personal goes, for good.",
        ),
    )
    def erase(self, request: HttpRequest, form, object_id: str) -> HttpResponse:
        return self.decide(
            request,
            object_id,
            lambda user: delete_account(user, request.user),
            "The account is deleted.",
        )


@admin.register(Enrolment)
class EnrolmentAdmin(ReadOnlyAdmin):
    list_display = ["code", "decision", "decided_by", "created", "expires"]
    list_filter = ["decision"]
    list_select_related = ["decided_by"]


@admin.register(Team)
class TeamAdmin(ReadOnlyAdmin):
    list_display = ["name", "size", "created"]
    search_fields = ["name", "slug", "people__email", "people__name"]
    fields = ["name", "id", "slug", "created", "who"]
    actions_detail = ["disband"]

    def get_queryset(self, request: HttpRequest):
        return super().get_queryset(request).prefetch_related("members__person")

    @admin.display(description="members")
    def size(self, team: Team) -> int:
        return len(team.members.all())

    @admin.display(description="members")
    def who(self, team: Team) -> str:
        return ", ".join(f"{m.person}{' (leads)' if m.leads else ''}" for m in team.members.all())

    @action(
        description="Disband",
        permissions=DECIDE,
        variant=ActionVariant.DANGER,
        dialog=dialog_options(
            "Disband", "The team is no more. Its people and machines stay.", ReasonForm
        ),
    )
    def disband(self, request: HttpRequest, form, object_id: str) -> HttpResponse:
        reason = form.cleaned_data["reason"]
        return self.decide(
            request,
            object_id,
            lambda team: team.disband(request.user, reason),
            "{name} is disbanded.",
        )


@admin.register(SiteSettings)
class SiteRulesAdmin(ModelAdmin):
    """One row, always there."""

    list_display = ["__str__", "organisers"]

    def get_queryset(self, request: HttpRequest):
        SiteSettings.objects.get_or_create(pk=SiteSettings.current().pk)
        return super().get_queryset(request)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj=None) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: SiteSettings, form, change: bool) -> None:
        SiteSettings.set_organisers(obj.organisers, request.user)
