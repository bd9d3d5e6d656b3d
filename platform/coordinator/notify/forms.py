"""What people choose to be told, and where their programs hear of it."""

from django import forms

from coordinator.lib import safe_http
from coordinator.lib.exceptions import UserError
from coordinator.notify.models import NotificationPreference, Webhook
from coordinator.notify.notification_types import NotificationType


class PreferencesForm(forms.Form):
    """Two boxes a kind, called `site-<kind>` and `email-<kind>`."""

    def __init__(self, *args, person, **kwargs):
        super().__init__(*args, **kwargs)
        self.person = person
        for kind, choice in NotificationPreference.for_person(person).items():
            for where in ("site", "email"):
                self.fields[f"{where}-{kind}"] = forms.BooleanField(
                    required=False,
                    initial=getattr(choice, where),
                    label=f"{NotificationType(kind).label}: {where}",
                )

    def save(self) -> None:
        for kind in NotificationType:
            wanted = {
                where: self.cleaned_data[f"{where}-{kind.value}"] for where in ("site", "email")
            }
            NotificationPreference.set_wanted(self.person, kind.value, **wanted)

    def rows(self) -> list[tuple[str, forms.BoundField, forms.BoundField]]:
        """(words, the box of the site, the box of letters)."""
        return [
            (kind.label, self[f"site-{kind.value}"], self[f"email-{kind.value}"])
            for kind in NotificationType
        ]


class WebhookTypesForm(forms.Form):
    """Of what a webhook hears."""

    kinds = forms.MultipleChoiceField(
        label="Of what",
        choices=NotificationType.choices,
        widget=forms.CheckboxSelectMultiple,
        error_messages={"required": "Choose at least one, or switch the webhook off."},
    )

    def __init__(self, *args, hook: Webhook, **kwargs):
        # Several of these are on one page: their boxes need names of their own.
        super().__init__(*args, initial={"kinds": hook.kinds}, auto_id=f"id_{hook.pk}_%s", **kwargs)
        self.hook = hook

    def save(self) -> None:
        self.hook.set_types(self.cleaned_data["kinds"])


class WebhookForm(forms.Form):
    url = forms.CharField(
        label="URL",
        max_length=500,
        help_text="https only, and a public address.",
        widget=forms.TextInput(
            attrs={"inputmode": "url", "placeholder": "https://example.org/hook"}
        ),
    )
    kinds = forms.MultipleChoiceField(
        label="Of what",
        choices=NotificationType.choices,
        widget=forms.CheckboxSelectMultiple,
        initial=list(NotificationType.values),
    )

    def save(self, person) -> Webhook | None:
        """None when it cannot be, which is then said at the field."""
        try:
            return Webhook.add(person, self.cleaned_data["url"], self.cleaned_data["kinds"])
        except safe_http.UnsafeUrlError as error:
            self.add_error("url", f"{str(error)[:1].upper()}{str(error)[1:]}.")
        except UserError as error:
            self.add_error(None, error.sentence)
        return None
