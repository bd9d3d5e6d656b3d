"""What people are asked about themselves and their teams."""

from django import forms


class SignupForm(forms.Form):
    name = forms.CharField(
        max_length=60, required=False, help_text="Shown to others next to your machines."
    )

    def signup(self, request, user) -> None:
        user.rename(self.cleaned_data["name"])


class NameForm(forms.Form):
    name = forms.CharField(
        max_length=60, required=False, help_text="Shown to others next to your machines."
    )


class DeleteAccountForm(forms.Form):
    """Typed rather than clicked: there is no way back."""

    email = forms.EmailField(
        label="Your e-mail address", help_text="Type it to say that you mean it."
    )

    def __init__(self, *args, person, **kwargs):
        super().__init__(*args, **kwargs)
        self.person = person
        self.fields["email"].widget.attrs["autocomplete"] = "off"

    def clean_email(self) -> str:
        typed = self.cleaned_data["email"]
        if typed.lower() != self.person.email.lower():
            raise forms.ValidationError(f"Your address here is {self.person.email}.")
        return typed


class TeamForm(forms.Form):
    name = forms.CharField(
        required=False,
        max_length=200,
        label="Name",
        help_text="Others see it. 60 characters at most.",
    )


class TeamInvitationForm(forms.Form):
    email = forms.EmailField(
        label="E-mail address",
        help_text="They get a link that is good for 14 days, with or without an account.",
    )
