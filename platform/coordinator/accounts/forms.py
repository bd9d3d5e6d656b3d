"""Forms for people's names, accounts and teams."""

from typing import Any

from django import forms


class NameForm(forms.Form):
    """Change one's name."""

    name = forms.CharField(
        max_length=60, required=False, help_text="Shown to others next to your machines."
    )


class SignupForm(NameForm):
    """Additional fields of the sign-up form."""

    def signup(self, request: Any, user: Any) -> None:
        """Store the name; allauth calls this after it has created the account."""
        user.rename(self.cleaned_data["name"])


class DeleteAccountForm(forms.Form):
    """Confirm by typing, because a deleted account cannot be restored."""

    email = forms.EmailField(label="Your email address", help_text="Type it to confirm.")

    def __init__(self, *args: Any, person: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.person = person
        self.fields["email"].widget.attrs["autocomplete"] = "off"

    def clean_email(self) -> str:
        """Compare with the account's address."""
        typed = self.cleaned_data["email"]
        if typed.lower() != self.person.email.lower():
            raise forms.ValidationError(f"Your address here is {self.person.email}.")
        return typed


class TeamForm(forms.Form):
    """Name a team."""

    name = forms.CharField(
        required=False,
        max_length=200,
        label="Name",
        help_text="Visible to others. At most 60 characters.",
    )


class TeamInvitationForm(forms.Form):
    """Invite an address into a team."""

    email = forms.EmailField(
        label="Email address",
        help_text="They receive a link that is valid for 14 days; they need no account yet.",
    )
