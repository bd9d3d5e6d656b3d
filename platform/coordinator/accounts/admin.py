"""People, teams, enrolments and site settings for the staff. Machines are in `fleet/admin.py`."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.usersessions.models import UserSession
from django import forms
from django.contrib import admin
from django.contrib.auth.models import Group
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from unfold.admin import ModelAdmin

from coordinator.accounts.deletion import delete_account
from coordinator.accounts.models import Enrolment, SiteSettings, Team, User
from coordinator.audit.admin_actions import ReadOnlyAdmin, ReasonForm, decision

# These modules register models; addresses and secrets are only their owners' business.
for app in ("django.contrib.auth", "allauth.account", "allauth.mfa", "allauth.usersessions"):
    import_module(f"{app}.admin")
admin.site.unregister([Group, EmailAddress, Authenticator, UserSession])


def _right_action(
    name: str, right: str, given: bool, title: str, consequence: str
) -> Callable[..., HttpResponse]:
    """Build the admin action that gives a right ("organiser" or "is_staff"), or withdraws it."""

    def change_right(self: ReadOnlyAdmin, user: User, actor: User, form: forms.Form) -> bool:
        return user.grant(right, actor, given)

    change_right.__name__ = name
    done, otherwise = "Done: {name}.", "Nothing changed: this was already so for {name}."
    return decision(title, consequence, done=done, otherwise=otherwise)(change_right)


@admin.register(User)
class UserAdmin(ReadOnlyAdmin):
    """People, whom the staff may give rights, ban and delete."""

    list_display = ["email", "name", "is_staff", "organiser", "is_active", "date_joined"]
    list_filter = ["is_staff", "organiser", "is_active", ("banned", admin.EmptyFieldListFilter)]
    search_fields = ["email", "name", "=id"]
    ordering = ["-id"]  # the newest first
    fields = [
        "email",
        "name",
        "id",
        "role",
        "in_teams",
        "is_superuser",
        "date_joined",
        "last_login",
        "banned",
        "ban_reason",
        "left",
    ]
    actions_detail = [
        "make_organiser",
        "remove_organiser",
        "ban",
        "unban",
        {"title": "More", "items": ["make_staff", "remove_staff", "erase"]},
    ]

    make_organiser = _right_action(
        "make_organiser",
        "organiser",
        True,
        "Make organiser",
        "They may create runs, whatever the site settings are.",
    )
    remove_organiser = _right_action(
        "remove_organiser",
        "organiser",
        False,
        "Remove as organiser",
        "They keep their runs. Whether they may create new ones depends on the site settings.",
    )
    make_staff = _right_action(
        "make_staff",
        "is_staff",
        True,
        "Make staff",
        "They may use this panel: see every address, ban people, end runs.",
    )
    remove_staff = _right_action(
        "remove_staff", "is_staff", False, "Remove from staff", "They may not use this panel."
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[User]:
        """Load teams with the people."""
        return super().get_queryset(request).prefetch_related("teams")

    @admin.display(description="teams")
    def in_teams(self, user: User) -> str:
        """List the person's teams."""
        return ", ".join(team.name for team in user.teams.all()) or "none"

    @decision(
        "Ban",
        "They cannot sign in, and all their machines are revoked permanently.",
        ReasonForm,
        done="{name} is banned.",
        otherwise="{name} was banned.",
        danger=True,
    )
    def ban(self, user: User, actor: User, form: ReasonForm) -> bool:
        """Ban the person."""
        return user.ban(actor, form.cleaned_data["reason"])

    @decision(
        "Lift the ban",
        "They may sign in again. Their machines must enrol with new keys.",
        done="{name} may sign in again.",
        otherwise="{name} is not banned.",
    )
    def unban(self, user: User, actor: User, form: forms.Form) -> bool:
        """Lift the ban."""
        return user.unban(actor)

    @decision(
        "Delete the account",
        "As if they had deleted it themselves: personal data is deleted permanently.",
        done="The account is deleted.",
        danger=True,
    )
    def erase(self, user: User, actor: User, form: forms.Form) -> None:
        """Delete the account."""
        delete_account(user, actor)


@admin.register(Enrolment)
class EnrolmentAdmin(ReadOnlyAdmin):
    """Requests of machines."""

    list_display = ["code", "decision", "decided_by", "created", "expires"]
    list_filter = ["decision"]
    list_select_related = ["decided_by"]


@admin.register(Team)
class TeamAdmin(ReadOnlyAdmin):
    """Teams, which the staff may disband."""

    list_display = ["name", "size", "created"]
    search_fields = ["name", "slug", "people__email", "people__name"]
    fields = ["name", "id", "slug", "created", "member_names"]
    actions_detail = ["disband"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Team]:
        """Load members with the teams."""
        return super().get_queryset(request).prefetch_related("members__person")

    @admin.display(description="members")
    def size(self, team: Team) -> int:
        """Count the members."""
        return len(team.members.all())

    @admin.display(description="members")
    def member_names(self, team: Team) -> str:
        """List the members' names."""
        return ", ".join(f"{m.person}{' (leads)' if m.leads else ''}" for m in team.members.all())

    @decision(
        "Disband",
        "The team is deleted. Its people and machines stay.",
        ReasonForm,
        done="{name} is disbanded.",
        danger=True,
    )
    def disband(self, team: Team, actor: User, form: ReasonForm) -> None:
        """Disband the team."""
        team.disband(actor, form.cleaned_data["reason"])


@admin.register(SiteSettings)
class SiteSettingsAdmin(ModelAdmin):
    """The one row of settings, which always exists."""

    list_display = ["__str__", "organisers", "sign_up"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[SiteSettings]:
        """Create the row before anybody looks for it."""
        SiteSettings.objects.get_or_create(pk=SiteSettings.current().pk)
        return super().get_queryset(request)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Allow no second row."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Keep the row."""
        return False

    def save_model(
        self, request: HttpRequest, obj: SiteSettings, form: forms.ModelForm, change: bool
    ) -> None:
        """Save by the model's own method, which writes the audit log."""
        SiteSettings.set_organisers(obj.organisers, request.user)
        SiteSettings.set_sign_up(obj.sign_up, obj.sign_up_domains, request.user)
