"""Notifications, the preferences for them, and webhooks with their deliveries."""

import base64
import secrets
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.conf import settings
from django.core.cache import cache
from django.db import models, transaction
from django.utils import timezone
from uuid6 import uuid7

from coordinator.audit.log import record
from coordinator.eventlog import private_data, writer
from coordinator.lib import safe_http
from coordinator.lib.exceptions import UserError
from coordinator.notify.notification_types import NotificationDraft, NotificationType
from coordinator.notify.webhook_formats import CallContent, WebhookFormat
from coordinator.replication import leases

if TYPE_CHECKING:
    from coordinator.accounts.models import User

MAX_WEBHOOKS = 5  # of one person
TEST_SECONDS = 60  # between two test calls of one person
MAX_FAILURES = 20  # in a row, after which a webhook is disabled
# Seconds before each further attempt to send an email or to call a webhook; then it is given up.
RETRY_SECONDS = (10, 60, 600, 3600, 6 * 3600)


class NotificationPreference(models.Model):
    """Where a person wants notifications of one type; without a row, everywhere."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    person = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.CASCADE,
        related_name="notification_preferences",
    )
    person_id: UUID
    kind = models.CharField(max_length=20, choices=NotificationType)
    site = models.BooleanField(default=True)
    email = models.BooleanField(default=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["person", "kind"], name="one_preference_per_type")
        ]

    def __str__(self) -> str:
        return f"{self.person}: {self.kind}"

    @classmethod
    def for_person(cls, person: "User") -> dict[str, "NotificationPreference"]:
        """Return a person's preference for each type; unsaved ones hold the defaults."""
        saved = {preference.kind: preference for preference in cls.objects.filter(person=person)}
        return {
            kind.value: saved.get(kind.value) or cls(person=person, kind=kind.value)
            for kind in NotificationType
        }

    @classmethod
    def set_wanted(
        cls,
        person: "User",
        kind: str,
        *,
        site: bool | None = None,
        email: bool | None = None,
    ) -> None:
        """Change a preference; None leaves a value as it is."""
        values = {"site": site, "email": email}
        wanted = {name: value for name, value in values.items() if value is not None}
        with writer.log_transaction():
            before = cls.for_person(person)[NotificationType(kind).value]
            after, _ = cls.objects.update_or_create(
                person=person, kind=before.kind, defaults=wanted
            )
            for channel in wanted:
                if getattr(before, channel) != getattr(after, channel):
                    payload = after.as_event(channel)
                    writer.record("preference.set", person.pk, payload)

    def as_event(self, channel: str) -> dict[str, Any]:
        """Return the event payload for one channel, "site" or "email"."""
        return {"kind": self.kind, "channel": channel, "wanted": getattr(self, channel)}


class Notification(models.Model):
    """A notification of one event for one person.

    `key` names the event, so that a person is notified of it once. `shown` is False where the
    person does not want it on the site; the row still prevents a second email. `email_due` is when
    the email is sent or tried again, or None if there is none to send.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    person = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="notifications"
    )
    person_id: UUID
    kind = models.CharField(max_length=20, choices=NotificationType)
    key = models.CharField(max_length=160)
    title = models.CharField(max_length=160)
    text = models.CharField(max_length=600, blank=True)
    url = models.CharField(max_length=200, blank=True)
    created = models.DateTimeField(default=timezone.now)
    shown = models.BooleanField(default=True)
    read = models.DateTimeField(null=True)
    email_due = models.DateTimeField(null=True)
    email_tries = models.PositiveSmallIntegerField(default=0)
    emailed = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(fields=["person", "key"], name="one_notification_per_event")
        ]
        indexes = [
            models.Index(fields=["key"], name="notification_key"),
            models.Index(
                fields=["email_due"],
                condition=models.Q(email_due__isnull=False),
                name="notification_email_due",
            ),
            models.Index(
                fields=["person"],
                condition=models.Q(read__isnull=True, shown=True),
                name="notification_unread",
            ),
        ]

    def __str__(self) -> str:
        return self.title

    @property
    def lease_name(self) -> str:
        """Name the lease of its email, the same at every mirror that detects the event."""
        return leases.lease_name("email", self.person_id, self.key)

    @classmethod
    def create_once(cls, draft: NotificationDraft) -> "Notification | None":
        """Store a notification and the deliveries to the person's webhooks.

        Returns:
            None if the person was notified of this event before, also by a concurrent call.
        """
        preference = NotificationPreference.for_person(draft.person)[draft.kind]
        with transaction.atomic():
            notification, is_new = cls.objects.get_or_create(
                person=draft.person,
                key=draft.key[:160],
                defaults={
                    "kind": draft.kind,
                    "title": draft.title[:160],
                    "text": draft.text[:600],
                    "url": draft.url[:200],
                    "shown": preference.site,
                    "email_due": timezone.now() if preference.email else None,
                },
            )
            if not is_new:
                return None
            for webhook in Webhook.objects.filter(person=draft.person, active=True):
                if draft.kind in webhook.kinds:
                    webhook.create_delivery(notification, draft.data)
        return notification

    @classmethod
    def mark_read(cls, person: "User") -> int:
        """Mark all notifications of a person as read; return how many were unread."""
        return cls.objects.filter(person=person, read=None).update(read=timezone.now())


class Webhook(models.Model):
    """A URL of an organiser that the site calls when an event happens.

    Each call is signed with `secret` (standardwebhooks.com). `kinds` are the values of the
    notification types that it receives, `failures` the failed calls in a row.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    person = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="webhooks"
    )
    person_id: UUID
    url = models.CharField(max_length=500)
    secret = models.CharField(max_length=60)
    kinds = models.JSONField(default=list)
    format = models.CharField(max_length=10, choices=WebhookFormat, default=WebhookFormat.STANDARD)
    active = models.BooleanField(default=True)
    failures = models.PositiveIntegerField(default=0)
    last_answer = models.CharField(max_length=200, blank=True)
    last_tried = models.DateTimeField(null=True)
    created = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["created"]

    def __str__(self) -> str:
        return f"webhook {self.pk}"

    @classmethod
    def add(
        cls,
        person: "User",
        url: str,
        kinds: list[str],
        receiver: str = WebhookFormat.STANDARD,
    ) -> "Webhook":
        """Create a webhook.

        Raises:
            UserError: The person is not an organiser or has too many webhooks.
            safe_http.UnsafeUrlError: The URL is not a public https address.
        """
        if not person.may_create_runs:
            raise UserError("webhooks are for organisers")
        if cls.objects.filter(person=person).count() >= MAX_WEBHOOKS:
            raise UserError(f"nobody has more than {MAX_WEBHOOKS} webhooks: remove one first")
        safe_http.resolve_target(url)
        secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
        with writer.log_transaction():
            webhook = cls.objects.create(
                person=person, url=url.strip(), secret=secret, kinds=list(kinds), format=receiver
            )
            writer.record("webhook.set", webhook.pk, webhook.as_event())
            record("webhook.add", webhook, actor=person, kinds=list(kinds))
        return webhook

    def as_event(self) -> dict[str, Any]:
        """Return the event payload, and store its private data; within `writer.log_transaction`."""
        details = {
            "url": self.url,
            "secret": self.secret,
            "kinds": self.kinds,
            "format": self.format,
        }
        return {
            "person": self.person_id,
            "created": self.created,
            "active": self.active,
            "content_digest": private_data.store(f"webhook:{self.pk}", details),
        }

    def set_types(self, kinds: list[str]) -> bool:
        """Change the notification types that it receives; deliveries that are due stay.

        Returns:
            False if nothing changed.
        """
        wanted = [kind.value for kind in NotificationType if kind.value in kinds]
        with writer.log_transaction():
            unequal = Webhook.objects.filter(pk=self.pk).exclude(kinds=wanted)
            is_changed = unequal.update(kinds=wanted) == 1
            if is_changed:
                self.refresh_from_db()
                writer.record("webhook.set", self.pk, self.as_event())
                record("webhook.change", self, actor=self.person, kinds=wanted)
        self.refresh_from_db()
        return is_changed

    def remove(self) -> None:
        """Delete the webhook and its deliveries."""
        with writer.log_transaction():
            record("webhook.remove", self, actor=self.person)
            writer.record("webhook.remove", self.pk, {})
            self.delete()

    def set_active(self, on: bool) -> None:
        """Enable the webhook, or disable it and cancel its deliveries."""
        with writer.log_transaction():
            rows = Webhook.objects.filter(pk=self.pk, active=not on)
            is_changed = rows.update(active=on, failures=0) == 1
            self.refresh_from_db()
            if is_changed:
                writer.record("webhook.set", self.pk, self.as_event())
                record("webhook.on" if on else "webhook.off", self, actor=self.person)
            if not on:
                self.cancel_deliveries()

    def cancel_deliveries(self) -> None:
        """Cancel all deliveries that are due."""
        Delivery.objects.filter(webhook=self, due__isnull=False).update(due=None)

    def create_delivery(
        self, notification: Notification | None, data: dict[str, Any]
    ) -> "Delivery":
        """Queue a call about a notification; None is a test call."""
        kind = notification.kind if notification else "test"
        body = {"type": kind, "timestamp": timezone.now().isoformat(), "data": data}
        return Delivery.objects.create(webhook=self, notification=notification, body=body)

    def set_format(self, receiver: str) -> None:
        """Change how its calls are written."""
        with writer.log_transaction():
            if Webhook.objects.filter(pk=self.pk).exclude(format=receiver).update(format=receiver):
                self.refresh_from_db()
                writer.record("webhook.set", self.pk, self.as_event())
                record("webhook.change", self, actor=self.person, format=receiver)

    def create_test_delivery(self) -> "Delivery":
        """Queue a test call.

        Raises:
            UserError: The person requested one within the last minute, for any of their webhooks.
        """
        if not cache.add(f"webhook-test:{self.person_id}", 1, TEST_SECONDS):
            raise UserError("One test call a minute: try again in a moment.")
        return self.create_delivery(None, {"greeting": "Hello from Barnraise."})

    def record_response(self, is_success: bool, answer: str) -> None:
        """Store whether the response was a 2xx, and its status or what went wrong.

        Too many failures in a row, or a 410, disable the webhook.
        """
        rows = Webhook.objects.filter(pk=self.pk)
        now = timezone.now()
        if is_success:
            rows.update(failures=0, last_answer=answer[:200], last_tried=now)
            return
        failures = models.F("failures") + 1
        rows.update(failures=failures, last_answer=answer[:200], last_tried=now)
        self.refresh_from_db()
        if self.active and (self.failures >= MAX_FAILURES or answer == "410"):
            self.set_active(False)


class Delivery(models.Model):
    """A call to a webhook.

    `due` is when it is made or tried again; None: it was made or given up.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    webhook = models.ForeignKey(Webhook, on_delete=models.CASCADE, related_name="deliveries")
    webhook_id: UUID
    notification = models.ForeignKey(
        Notification, null=True, on_delete=models.CASCADE, related_name="deliveries"
    )
    body = models.JSONField()
    due = models.DateTimeField(null=True, default=timezone.now)
    tries = models.PositiveSmallIntegerField(default=0)
    delivered = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["webhook", "notification"], name="one_delivery_per_notification"
            )
        ]
        indexes = [
            models.Index(fields=["due"], condition=models.Q(due__isnull=False), name="delivery_due")
        ]

    def __str__(self) -> str:
        return f"{self.body.get('type')} to {self.webhook}"

    @property
    def content(self) -> CallContent:
        """What the call is about, for every format."""
        notification = self.notification
        if notification is None:
            return CallContent("Hello from Barnraise", "This is a test.", "", self.body)
        url = f"{settings.SITE_URL}{notification.url}" if notification.url else ""
        return CallContent(notification.title, notification.text, url, self.body)

    @property
    def lease_name(self) -> str | None:
        """Name its lease, the same at every mirror that detects the event.

        None for a test call, which only this mirror knows.
        """
        if self.notification is None:
            return None
        return leases.lease_name("call", self.webhook_id, self.notification.key)

    @property
    def message_id(self) -> str:
        """Identify the call for its receiver, the same from whichever mirror it comes."""
        return f"msg_{self.lease_name[:32]}" if self.lease_name else str(self.pk)


def next_attempt(tries: int) -> datetime | None:
    """Return when to try again after so many attempts; None to give up."""
    if tries > len(RETRY_SECONDS):
        return None
    return timezone.now() + timedelta(seconds=RETRY_SECONDS[tries - 1])
