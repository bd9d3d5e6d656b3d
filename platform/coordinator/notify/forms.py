"""Forms for notification preferences and webhooks."""

from typing import Any

from django import forms

from coordinator.accounts.models import User
from coordinator.lib import safe_http
from coordinator.lib.exceptions import UserError
from coordinator.notify.models import NotificationPreference, Webhook
from coordinator.notify.notification_types import NotificationType
from coordinator.notify.webhook_formats import WebhookFormat

CHANNELS = {"site": "site", "email": "email"}


class PreferencesForm(forms.Form):
    """Two checkboxes for each type, called `site-<type>` and `email-<type>`."""

    def __init__(self, *args: Any, person: User, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.person = person
        for kind, preference in NotificationPreference.for_person(person).items():
            for channel, label in CHANNELS.items():
                self.fields[f"{channel}-{kind}"] = forms.BooleanField(
                    required=False,
                    initial=getattr(preference, channel),
                    label=f"{NotificationType(kind).label}: {label}",
                )

    def save(self) -> None:
        """Store what changed."""
        for kind in NotificationType:
            NotificationPreference.set_wanted(
                self.person,
                kind.value,
                site=self.cleaned_data[f"site-{kind.value}"],
                email=self.cleaned_data[f"email-{kind.value}"],
            )

    def rows(self) -> list[tuple[str, forms.BoundField, forms.BoundField]]:
        """List (label of the type, checkbox for the site, checkbox for emails)."""
        return [
            (str(kind.label), self[f"site-{kind.value}"], self[f"email-{kind.value}"])
            for kind in NotificationType
        ]


def types_field(**options: Any) -> forms.MultipleChoiceField:
    """Build the field with the notification types that a webhook receives."""
    return forms.MultipleChoiceField(
        label="Events",
        choices=NotificationType.choices,
        widget=forms.CheckboxSelectMultiple,
        **options,
    )


def format_field() -> forms.ChoiceField:
    """Build the field with the receiver of a webhook's calls."""
    return forms.ChoiceField(
        label="Format",
        choices=WebhookFormat.choices,
        required=False,
        help_text=(
            "Slack: an incoming webhook. Discord: a channel's webhook. Matrix: an inbound webhook "
            "of hookshot. ntfy: the address of a topic."
        ),
    )


class WebhookTypesForm(forms.Form):
    """The notification types that a webhook receives."""

    kinds = types_field(error_messages={"required": "Choose at least one, or disable the webhook."})
    format = format_field()

    def __init__(self, *args: Any, hook: Webhook, **kwargs: Any) -> None:
        # A page has one form for each webhook, so the ids of their fields must differ.
        initial = {"kinds": hook.kinds, "format": hook.format}
        super().__init__(*args, initial=initial, auto_id=f"id_{hook.pk}_%s", **kwargs)
        self.hook = hook

    def save(self) -> None:
        """Store the types."""
        self.hook.set_types(self.cleaned_data["kinds"])
        self.hook.set_format(self.cleaned_data["format"] or self.hook.format)


class WebhookForm(forms.Form):
    """A new webhook."""

    url = forms.CharField(
        label="URL",
        max_length=500,
        help_text="A public https address.",
        widget=forms.TextInput(
            attrs={"inputmode": "url", "placeholder": "https://example.org/hook"}
        ),
    )
    kinds = types_field(initial=list(NotificationType.values))
    format = format_field()

    def save(self, person: User) -> Webhook | None:
        """Create the webhook; return None if that is refused, with an error at the field."""
        try:
            values = self.cleaned_data
            receiver = values["format"] or WebhookFormat.STANDARD
            return Webhook.add(person, values["url"], values["kinds"], receiver)
        except safe_http.UnsafeUrlError as error:
            self.add_error("url", f"{str(error)[:1].upper()}{str(error)[1:]}.")
        except UserError as error:
            self.add_error(None, error.sentence)
        return None
