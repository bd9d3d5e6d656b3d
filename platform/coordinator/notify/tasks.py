"""Celery tasks that create notifications, send emails and call webhooks.

A task may run twice, late, or concurrently with itself: rows are claimed by one conditional UPDATE,
and what a crash interrupts is tried again.
"""

import asyncio
import base64
import hashlib
import hmac
import logging
import time
from datetime import UTC, datetime, timedelta
from itertools import groupby
from smtplib import SMTPException
from typing import Any

import httpx
from celery import shared_task
from django.conf import settings
from django.core import signing
from django.core.mail import EmailMessage, get_connection
from django.db.models import F, Window
from django.db.models.functions import RowNumber
from django.template.loader import render_to_string
from django.utils import timezone

from coordinator.accounts.models import User
from coordinator.lib import safe_http
from coordinator.lib.valkey import valkey_client
from coordinator.notify.detectors import detect_all
from coordinator.notify.models import Delivery, Notification, next_attempt
from coordinator.notify.webhook_formats import render_call
from coordinator.replication import leases
from coordinator.replication.lease_election import LeaseDecision

log = logging.getLogger("coordinator.notify")

# Of one run of a task, so that reports and the lifecycle of runs are not delayed.
MAX_NOTIFICATIONS = 500
MAX_EMAILS = 50
MAX_DELIVERIES = 32
MAX_DELIVERIES_PER_PERSON = 4  # so that one person's slow webhooks do not occupy all calls
CLAIM_TIMEOUT = timedelta(minutes=2)  # after which a claimed row is due again
RECHECK_AFTER = timedelta(seconds=20)  # when another mirror should do it
GIVE_UP_AFTER = timedelta(hours=12)  # when no mirror has done it
RETENTION = timedelta(days=90)
# Valkey's keys: one that expires when sweeps stop, and when they began without interruption.
SWEEPING_KEY = "notify:hearing"
SINCE_KEY = "notify:since"
MAX_GAP = 120  # seconds between two sweeps that do not count as an interruption
UNSUBSCRIBE = "notify.unsubscribe"  # the salt of unsubscribe links


@shared_task(name="notify.sweep", time_limit=60, soft_time_limit=50)
def sweep() -> int:
    """Detect events and create notifications; return how many were created."""
    drafts = [draft for draft in detect_all(reporting_since()) if draft.person.is_active]
    existing = set(
        Notification.objects.filter(key__in={draft.key for draft in drafts}).values_list(
            "person", "key"
        )
    )
    new = [draft for draft in drafts if (draft.person.pk, draft.key) not in existing]
    return sum(Notification.create_once(draft) is not None for draft in new[:MAX_NOTIFICATIONS])


def reporting_since() -> datetime:
    """Return since when sweeps, and with them reports, have come without interruption.

    It lets a site that was down not report machines as quiet.
    """
    valkey = valkey_client()
    now = time.time()
    if not valkey.set(SWEEPING_KEY, 1, ex=MAX_GAP, get=True):
        valkey.set(SINCE_KEY, now)
    since: Any = valkey.get(SINCE_KEY)
    return datetime.fromtimestamp(float(since or now), UTC)


@shared_task(name="notify.emails", time_limit=120, soft_time_limit=100)
def send_emails() -> int:
    """Send each person one email with all notifications that are due; return how many were sent."""
    due = (
        Notification.objects.filter(email_due__lte=timezone.now())
        .order_by("person", "id")
        .select_related("person")
    )
    sent = 0
    connection = get_connection()
    for person, group in groupby(list(due[:MAX_EMAILS]), key=lambda row: row.person):
        notifications = [row for row in group if _claim_email(row)]
        if not notifications:
            continue
        rows = Notification.objects.filter(pk__in=[row.pk for row in notifications])
        if not person.is_active:
            rows.update(email_due=None)
            continue
        try:
            connection.send_messages([build_email(person, notifications)])
        except (OSError, SMTPException) as error:
            log.warning(
                "an email with %d notifications is postponed: %s", len(notifications), error
            )
            for row in notifications:
                due_again = next_attempt(row.email_tries + 1)
                Notification.objects.filter(pk=row.pk).update(email_due=due_again)
            break  # the other emails would fail at the same server
        rows.update(email_due=None, emailed=timezone.now())
        leases.mark_done(*(row.lease_name for row in notifications))
        sent += 1
    return sent


def build_email(person: User, notifications: list[Notification]) -> EmailMessage:
    """Build the email with a person's notifications.

    Its Message-ID is derived from its content, so that mail programs recognise a duplicate, also
    one from another mirror.
    """
    token = signing.dumps(str(person.pk), salt=UNSUBSCRIBE)
    unsubscribe_url = f"{settings.SITE_URL}/notifications/unsubscribe/{token}/"
    context = {
        "notifications": notifications,
        "site": settings.SITE_URL,
        "name": settings.MIRROR_NAME,
        "unsubscribe_url": unsubscribe_url,
    }
    if len(notifications) == 1:
        title = notifications[0].title
    else:
        title = f"{len(notifications)} notifications"
    names = sorted(row.lease_name for row in notifications)
    message_id = leases.lease_name(*names)[:32]
    return EmailMessage(
        " ".join(f"{settings.MIRROR_NAME}: {title}".split()),
        render_to_string("emails/notifications.txt", context),
        to=[person.email],
        headers={
            "Message-ID": f"<{message_id}@notifications.barnraise>",
            "List-Unsubscribe": f"<{unsubscribe_url}>",
            "List-Unsubscribe-Post": "List-Unsubscribe=One-Click",
        },
    )


@shared_task(name="notify.webhooks", time_limit=60, soft_time_limit=50)
def deliver_webhooks() -> int:
    """Make all webhook calls that are due, concurrently; return how many succeeded."""
    due = Delivery.objects.filter(due__lte=timezone.now(), webhook__active=True)
    place = Window(RowNumber(), partition_by="webhook__person", order_by=F("due").asc())
    first = due.annotate(place=place).filter(place__lte=MAX_DELIVERIES_PER_PERSON)
    rows = first.order_by("due").select_related("webhook", "notification")[:MAX_DELIVERIES]
    deliveries = [row for row in rows if _claim_delivery(row)]
    results = asyncio.run(_call_all(deliveries))
    for delivery, (is_success, answer) in zip(deliveries, results, strict=True):
        delivery.webhook.record_response(is_success, answer)
        # A webhook that was disabled meanwhile has no row that is due.
        row = Delivery.objects.filter(pk=delivery.pk, due__isnull=False)
        if is_success:
            row.update(due=None, delivered=timezone.now())
            if delivery.lease_name:
                leases.mark_done(delivery.lease_name)
        else:
            row.update(due=next_attempt(delivery.tries + 1))
    return sum(is_success for is_success, _ in results)


async def _call_all(deliveries: list[Delivery]) -> list[tuple[bool, str]]:
    return await asyncio.gather(*(call_webhook(delivery) for delivery in deliveries))


async def call_webhook(delivery: Delivery) -> tuple[bool, str]:
    """Make one call; return (whether it was answered with a 2xx, the status or the error)."""
    webhook = delivery.webhook
    body, headers = render_call(webhook.format, delivery.content)
    headers |= signature_headers(webhook.secret, delivery.message_id, body)
    try:
        status = await safe_http.post(webhook.url, body, headers)
        return 200 <= status < 300, str(status)
    except TimeoutError:
        return False, "no answer in time"
    except (safe_http.UnsafeUrlError, httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return False, str(error) or type(error).__name__


def signature_headers(
    secret: str, message_id: str, body: bytes, now: float | None = None
) -> dict[str, str]:
    """Return a call's headers with its id, time and signature (standardwebhooks.com).

    Args:
        secret: The webhook's secret, "whsec_" and base64.
        message_id: The same for every attempt.
        body: The exact bytes of the call.
        now: The time in seconds since 1970; None: the current time.
    """
    timestamp = str(int(time.time() if now is None else now))
    key = base64.b64decode(secret.removeprefix("whsec_"))
    mac = hmac.new(key, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return {
        "User-Agent": "Barnraise",
        "webhook-id": message_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{base64.b64encode(mac).decode()}",
    }


@shared_task(name="notify.delete_old", time_limit=120)
def delete_old() -> int:
    """Delete notifications that are older than three months; return how many rows were deleted."""
    return Notification.objects.filter(created__lt=timezone.now() - RETENTION).delete()[0]


def _claim_email(row: Notification) -> bool:
    """Claim a notification's email and its lease; return whether this process sends it."""
    claimed = Notification.objects.filter(pk=row.pk, email_due=row.email_due).update(
        email_due=timezone.now() + CLAIM_TIMEOUT, email_tries=row.email_tries + 1
    )
    if claimed != 1:
        return False
    decision = leases.acquire(row.lease_name, row.created)
    if decision is LeaseDecision.HELD:
        return True
    Notification.objects.filter(pk=row.pk).update(
        email_due=_recheck_time(decision, row.created), email_tries=row.email_tries
    )
    return False


def _claim_delivery(row: Delivery) -> bool:
    """Claim a webhook call and its lease; return whether this process makes it."""
    claimed = Delivery.objects.filter(pk=row.pk, due=row.due).update(
        due=timezone.now() + CLAIM_TIMEOUT, tries=row.tries + 1
    )
    if claimed != 1:
        return False
    if row.notification is None or row.lease_name is None:
        return True
    decision = leases.acquire(row.lease_name, row.notification.created)
    if decision is LeaseDecision.HELD:
        return True
    Delivery.objects.filter(pk=row.pk).update(
        due=_recheck_time(decision, row.notification.created), tries=row.tries
    )
    return False


def _recheck_time(decision: LeaseDecision, since: datetime) -> datetime | None:
    """Return when to check again whether another mirror has done it; None: never again."""
    is_over = decision is LeaseDecision.DONE or timezone.now() - since > GIVE_UP_AFTER
    return None if is_over else timezone.now() + RECHECK_AFTER
