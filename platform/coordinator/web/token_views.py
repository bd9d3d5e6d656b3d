"""A person's API tokens: create, show once, revoke."""

import uuid

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST

from coordinator.accounts.requests import AuthenticatedRequest
from coordinator.tokens.models import MAX_DAYS, SCOPES, Token

MAX_TOKENS = 50  # of one person, without revoked ones


class TokenForm(forms.Form):
    """A new token."""

    name = forms.CharField(
        max_length=60,
        label="Name",
        help_text="What the token is for.",
        required=True,
    )
    days = forms.IntegerField(
        min_value=1,
        max_value=MAX_DAYS,
        initial=90,
        label="Expires after (days)",
        widget=forms.TextInput,
    )
    scopes = forms.MultipleChoiceField(
        choices=[(name, f"{name}: {description}") for name, description in SCOPES.items()],
        initial=["runs:read"],
        label="Permissions",
        widget=forms.CheckboxSelectMultiple,
        error_messages={"required": "Choose at least one permission."},
    )

    def clean_name(self) -> str:
        """Remove unprintable characters."""
        return "".join(c for c in self.cleaned_data["name"] if c.isprintable())


@login_required
@never_cache
def list_tokens(request: AuthenticatedRequest) -> HttpResponse:
    """List the tokens; a POST creates one and shows its text, which is not stored."""
    form = TokenForm(request.POST or None)
    tokens = request.user.tokens.filter(revoked=None)
    text = ""
    if request.method == "POST" and form.is_valid():
        if tokens.count() >= MAX_TOKENS:
            form.add_error(None, f"You have {MAX_TOKENS} tokens: revoke one first.")
        else:
            values = form.cleaned_data
            _, text = Token.create(request.user, values["name"], values["scopes"], values["days"])
            form = TokenForm()
    context = {"form": form, "tokens": tokens, "text": text}
    return render(request, "tokens.html", context, status=422 if form.is_bound else 200)


@login_required
@require_POST
def revoke_token(request: AuthenticatedRequest, pk: uuid.UUID) -> HttpResponse:
    """Revoke a token."""
    token = get_object_or_404(Token, pk=pk, user=request.user)
    if token.revoke(actor=request.user):
        messages.success(request, f"{token.name} is revoked.")
    return redirect("tokens")
