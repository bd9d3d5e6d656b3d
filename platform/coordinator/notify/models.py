"""A notice to a person, which of them they want, and the webhooks that get them too."""

import base64
import secrets
from datetime import timedelta

from django.conf import settings
from django.db import models, transaction
from django.utils import timezone
from uuid6 import uuid7

from coordinator.audit.log import record
from coordinator.eventlog import private_data
from coordinator.eventlog import writer as mirrors
from coordinator.lib import safe_http
from coordinator.lib.exceptions import UserError
from coordinator.notify.notification_types import NotificationDraft, NotificationType
from coordinator.replication import leases

MAX_WEBHOOKS = 5  # of one person
MAX_FAILURES = 20  # failures in a row after which a webhook is switched off
RETRY_SECONDS = (
    10,
    60,
    600,
    3600,
    6 * 3600,
)  # seconds before the next try; after the last there is none


class NotificationPreference(models.Model):
    """What a person wants of one kind; without a row: all of it."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    person = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="notification_settings"
    )
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
    def for_person(cls, person) -> dict[str, "NotificationPreference"]:
        """Kind → what they chose, or would have chosen."""
        chosen = {choice.kind: choice for choice in cls.objects.filter(person=person)}
        return {
            kind.value: chosen.get(kind.value) or cls(person=person, kind=kind.value)
            for kind in NotificationType
        }

    @classmethod
    def set_wanted(
        cls, person, kind: str, *, site: bool | None = None, email: bool | None = None
    ) -> None:
        """None leaves it as it is."""
        wanted = {
            name: value for name, value in (("site", site), ("email", email)) if value is not None
        }
        with mirrors.log_transaction():
            before = cls.for_person(person)[NotificationType(kind).value]
            made, _ = cls.objects.update_or_create(person=person, kind=before.kind, defaults=wanted)
            for where in wanted:
                if getattr(before, where) != getattr(made, where):
                    mirrors.record("wish.choose", person.pk, made.as_event(where))

    def as_event(self, where: str) -> dict:
        """To other mirrors."""
        return {"kind": self.kind, "where": where, "wanted": getattr(self, where)}


class Notification(models.Model):
    """One thing that happened, told to one person once: `key` names the event. `email_due`: when the letter is to be
    tried next; None: there is none to send."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    person = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="notifications"
    )
    kind = models.CharField(max_length=20, choices=NotificationType)
    key = models.CharField(max_length=160)
    title = models.CharField(max_length=160)
    text = models.CharField(max_length=600, blank=True)
    url = models.CharField(max_length=200, blank=True)
    created = models.DateTimeField(default=timezone.now)
    shown = models.BooleanField(
        default=True
    )  # False: not wanted in the site; the row remembers that it was told
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
        """The letter about it, the same at every mirror that finds what it is about."""
        return leases.lease_name("letter", self.person_id, self.key)

    @classmethod
    def create_once(cls, news: NotificationDraft) -> "Notification | None":
        """None when this person was told of this before. Whoever tells at the same moment, one notice comes of it."""
        choice = NotificationPreference.for_person(news.person)[news.kind]
        with transaction.atomic():
            notice, fresh = cls.objects.get_or_create(
                person=news.person,
                key=news.key[:160],
                defaults={
                    "kind": news.kind,
                    "title": news.title[:160],
                    "text": news.text[:600],
                    "url": news.url[:200],
                    "shown": choice.site,
                    "email_due": timezone.now() if choice.email else None,
                },
            )
            if not fresh:
                return None
            for hook in Webhook.objects.filter(person=news.person, active=True):
                if news.kind in hook.kinds:
                    hook.create_delivery(notice, news.data)
        return notice

    @classmethod
    def mark_read(cls, person) -> int:
        return cls.objects.filter(person=person, read=None).update(read=timezone.now())


class Webhook(models.Model):
    """Where an organiser's own programs hear of things: each call is signed with `secret`, as standardwebhooks.com
    says."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    person = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="webhooks"
    )
    url = models.CharField(max_length=500)
    secret = models.CharField(max_length=60)
    kinds = models.JSONField(default=list)
    active = models.BooleanField(default=True)
    failures = models.PositiveIntegerField(default=0)  # in a row
    last_answer = models.CharField(max_length=200, blank=True)
    last_tried = models.DateTimeField(null=True)
    created = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["created"]

    def __str__(self) -> str:
        return f"webhook {self.pk}"

    @classmethod
    def add(cls, person, url: str, kinds: list[str]) -> "Webhook":
        """Raises UserError, or safe_http.UnsafeUrlError."""
        if not person.may_create_runs:
            raise UserError("webhooks are for organisers")
        if person.webhooks.count() >= MAX_WEBHOOKS:
            raise UserError(f"nobody has more than {MAX_WEBHOOKS} webhooks: remove one first")
        safe_http.resolve_target(url)
        secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
        with mirrors.log_transaction():
            made = cls.objects.create(
                person=person, url=url.strip(), secret=secret, kinds=list(kinds)
            )
            mirrors.record("webhook.set", made.pk, made.as_event)
            record("webhook.add", made, actor=person, kinds=list(kinds))
        return made

    @property
    def as_event(self) -> dict:
        """To other mirrors; within `writer.log_transaction`."""
        kept = {"url": self.url, "secret": self.secret, "kinds": self.kinds}
        about = private_data.store(f"webhook:{self.pk}", kept)
        return {
            "person": self.person_id,
            "created": self.created,
            "active": self.active,
            "about": about,
        }

    def set_types(self, kinds: list[str]) -> bool:
        """Of what it hears from now on; what was owed before still comes. False when it was so before."""
        wanted = [kind.value for kind in NotificationType if kind.value in kinds]
        with mirrors.log_transaction():
            changed = (
                Webhook.objects.filter(pk=self.pk).exclude(kinds=wanted).update(kinds=wanted) == 1
            )
            if changed:
                self.refresh_from_db()
                mirrors.record("webhook.set", self.pk, self.as_event)
                record("webhook.listen", self, actor=self.person, kinds=wanted)
        self.refresh_from_db()
        return changed

    def remove(self) -> None:
        with mirrors.log_transaction():
            record("webhook.remove", self, actor=self.person)
            mirrors.record("webhook.remove", self.pk, {})
            self.delete()

    def set_active(self, on: bool) -> None:
        """Off: nothing more is sent; what was owed is dropped."""
        with mirrors.log_transaction():
            changed = (
                Webhook.objects.filter(pk=self.pk, active=not on).update(active=on, failures=0) == 1
            )
            self.refresh_from_db()
            if changed:
                mirrors.record("webhook.set", self.pk, self.as_event)
                record("webhook.on" if on else "webhook.off", self, actor=self.person)
            if not on:
                self.cancel_deliveries()

    def cancel_deliveries(self) -> None:
        """What was owed is not sent."""
        self.deliveries.filter(due__isnull=False).update(due=None)

    def create_delivery(self, notice: Notification | None, data: dict) -> "Delivery":
        """`notice` None: a call that its owner asked for, to try it."""
        kind = notice.kind if notice else "test"
        body = {"type": kind, "timestamp": timezone.now().isoformat(), "data": data}
        return Delivery.objects.create(webhook=self, notice=notice, body=body)

    def record_response(self, good: bool, said: str) -> None:
        """Notes how a call went; too many failures in a row, or a 410, switch it off."""
        now = timezone.now()
        if good:
            Webhook.objects.filter(pk=self.pk).update(
                failures=0, last_answer=said[:200], last_tried=now
            )
            return
        Webhook.objects.filter(pk=self.pk).update(
            failures=models.F("failures") + 1, last_answer=said[:200], last_tried=now
        )
        self.refresh_from_db()
        if self.active and (self.failures >= MAX_FAILURES or said == "410"):
            self.set_active(False)


class Delivery(models.Model):
    """One call that is owed to a webhook. `due`: when it is to be tried next; None: done, or given up."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    webhook = models.ForeignKey(Webhook, on_delete=models.CASCADE, related_name="deliveries")
    notice = models.ForeignKey(
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
                fields=["webhook", "notice"], name="one_delivery_per_notification"
            )
        ]
        indexes = [
            models.Index(fields=["due"], condition=models.Q(due__isnull=False), name="delivery_due")
        ]

    def __str__(self) -> str:
        return f"{self.body.get('type')} to {self.webhook}"

    @property
    def lease_name(self) -> str | None:
        """The same at every mirror that finds what it is about; None for a test, which is this mirror's."""
        return leases.lease_name("call", self.webhook_id, self.notice.key) if self.notice else None

    @property
    def message_id(self) -> str:
        """By which a program knows what it has heard, whichever mirror calls."""
        return f"msg_{self.lease_name[:32]}" if self.lease_name else str(self.pk)


def next_attempt(tries: int):
    """When to try once more after so many tries; None: not any more."""
    return (
        timezone.now() + timedelta(seconds=RETRY_SECONDS[tries - 1])
        if tries <= len(RETRY_SECONDS)
        else None
    )
