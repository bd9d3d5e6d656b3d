"""What a person is asked at sign-up beyond an address and a password."""

from django import forms


class SignupForm(forms.Form):
    name = forms.CharField(max_length=60, required=False, help_text="Shown to others next to your machines.")

    def signup(self, request, user) -> None:
        user.name = self.cleaned_data["name"].strip()
        user.save(update_fields=["name"])
