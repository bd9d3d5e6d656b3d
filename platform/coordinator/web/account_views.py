"""The account page, and the deletion of an account."""

from collections.abc import Callable
from typing import cast

from allauth.account.decorators import reauthentication_required
from allauth.account.models import EmailAddress
from allauth.mfa.utils import is_mfa_enabled
from django.contrib import messages
from django.contrib.auth import logout
from django.contrib.auth.decorators import login_required
from django.http import HttpResponse
from django.shortcuts import redirect, render

from coordinator.accounts import deletion
from coordinator.accounts.forms import DeleteAccountForm, NameForm
from coordinator.accounts.requests import AuthenticatedRequest

View = Callable[..., HttpResponse]
requires_reauthentication = cast(Callable[[View], View], reauthentication_required)  # untyped


@login_required
def show_account(request: AuthenticatedRequest) -> HttpResponse:
    """Show the account; a POST changes its name."""
    form = NameForm(request.POST or None, initial={"name": request.user.name})
    if request.method == "POST" and form.is_valid():
        request.user.rename(form.cleaned_data["name"])
        messages.success(request, "Saved.")
        return redirect("account")
    context = {
        "form": form,
        "addresses": EmailAddress.objects.filter(user=request.user).order_by("-primary", "email"),
        "two_factor": is_mfa_enabled(request.user),
        "team_memberships": request.user.team_memberships.select_related("team").order_by(
            "team__name"
        ),
    }
    return render(request, "account.html", context, status=422 if form.is_bound else 200)


@login_required
@requires_reauthentication
def delete_account(request: AuthenticatedRequest) -> HttpResponse:
    """Show what the deletion of the account removes; a POST with its email address deletes it."""
    person = request.user
    form = DeleteAccountForm(request.POST or None, person=person)
    if request.method == "POST" and form.is_valid():
        deletion.delete_account(person, person)
        logout(request)
        messages.success(request, "Your account is deleted. Thank you for your contributions.")
        return redirect("home")
    context = {
        "form": form,
        "machines": person.machines.count(),
        "drafts": person.runs.filter(spec_text="").count(),
        "under_way": [run for run in person.runs.exclude(spec_text="") if not run.is_over],
    }
    return render(request, "account_delete.html", context, status=422 if form.is_bound else 200)
