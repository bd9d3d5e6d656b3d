"""Telling people, by Celery. Each task may run twice, late, or beside itself: rows are claimed by one conditional
UPDATE, and what dies midway is tried again."""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import time
from datetime import UTC, datetime, timedelta
from itertools import groupby
from smtplib import SMTPException

import httpx
from celery import shared_task
from django.conf import settings
from django.core import signing
from django.core.mail import EmailMessage, get_connection
from django.db.models import QuerySet
from django.template.loader import render_to_string
from django.utils import timezone

from coordinator.lib import safe_http
from coordinator.lib.valkey import valkey_client
from coordinator.notify.detectors import detect_all
from coordinator.notify.models import Delivery, Notification, next_attempt
from coordinator.replication import leases
from coordinator.replication.lease_election import LeaseDecision

log = logging.getLogger("coordinator.notify")

TOLD, LETTERS, CALLS = 500, 50, 32  # of one task's turn: reports and runs wait for the same worker
LOOK = timedelta(seconds=20)  # until it is looked again whether another mirror has done it
GIVEN_UP = timedelta(hours=12)  # after which nobody does what nobody has done
LEASE = timedelta(minutes=2)  # how long a claimed row is left to whoever claimed it
HEARING, SINCE = "notify:hearing", "notify:since"  # keys in Valkey
BREAK = 120  # seconds without a sweep that count as a break
KEPT = timedelta(days=90)
UNSUBSCRIBE = "notify.unsubscribe"  # salt of the links in letters


@shared_task(name="notify.sweep", time_limit=60, soft_time_limit=50)
def sweep() -> int:
    """How many were told something new. Of what is found again and again only what is new costs more than a look."""
    found = [each for each in detect_all(reporting_since()) if each.person.is_active]
    known = set(
        Notification.objects.filter(key__in={each.key for each in found}).values_list(
            "person", "key"
        )
    )
    fresh = [each for each in found if (each.person.pk, each.key) not in known]
    return sum(Notification.create_once(each) is not None for each in fresh[:TOLD])


def reporting_since() -> datetime:
    """Since when sweeps, and with them reports, come without a break. A site that was down takes nobody for quiet."""
    valkey, now = valkey_client(), time.time()
    if not valkey.set(HEARING, 1, ex=BREAK, get=True):
        valkey.set(SINCE, now)
    return datetime.fromtimestamp(float(valkey.get(SINCE) or now), UTC)


@shared_task(name="notify.emails", time_limit=120, soft_time_limit=100)
def send_emails() -> int:
    """One letter a person with all that is due to them; how many went out."""
    due = (
        Notification.objects.filter(email_due__lte=timezone.now())
        .order_by("person", "id")
        .select_related("person")
    )
    sent, post = 0, get_connection()
    for person, notices in groupby(list(due[:LETTERS]), key=lambda notice: notice.person):
        mine = [
            notice
            for notice in notices
            if _claim(Notification.objects, notice, "email_due", "email_tries")
        ]
        mine = [
            notice
            for notice in mine
            if _take_turn(
                Notification.objects, notice, notice.lease_name, notice.created, "email_due"
            )
        ]
        if not mine:
            continue
        ids = [notice.pk for notice in mine]
        if not person.is_active:
            Notification.objects.filter(pk__in=ids).update(email_due=None)
            continue
        try:
            post.send_messages([build_email(person, mine)])
        except (OSError, SMTPException) as error:
            log.warning("a letter with %d notices is put off: %s", len(mine), error)
            for notice in mine:
                Notification.objects.filter(pk=notice.pk).update(
                    email_due=next_attempt(notice.email_tries + 1)
                )
            break  # the others would wait for the same server
        Notification.objects.filter(pk__in=ids).update(email_due=None, emailed=timezone.now())
        leases.mark_done(*(notice.lease_name for notice in mine))
        sent += 1
    return sent


def build_email(person, notices: list[Notification]) -> EmailMessage:
    """Its id is made of what it is about: sent twice, and by two mirrors, it is known as one."""
    off = f"{settings.SITE_URL}/notifications/unsubscribe/{signing.dumps(str(person.pk), salt=UNSUBSCRIBE)}/"
    told = {
        "notifications": notices,
        "site": settings.SITE_URL,
        "name": settings.MIRROR_NAME,
        "unsubscribe_url": off,
    }
    title = notices[0].title if len(notices) == 1 else f"{len(notices)} things happened"
    name = leases.lease_name(*sorted(notice.lease_name for notice in notices))[:32]
    headers = {
        "Message-ID": f"<{name}@letters.barnraise>",
        "List-Unsubscribe": f"<{off}>",
        "List-Unsubscribe-Post": "List-Unsubscribe=One-Click",
    }
    subject = " ".join(f"{settings.MIRROR_NAME}: {title}".split())
    return EmailMessage(
        subject,
        render_to_string("emails/notifications.txt", told),
        to=[person.email],
        headers=headers,
    )


@shared_task(name="notify.webhooks", time_limit=60, soft_time_limit=50)
def deliver_webhooks() -> int:
    """Makes the calls that are due, all at once; how many were answered well."""
    due = Delivery.objects.filter(due__lte=timezone.now(), webhook__active=True).order_by("due")
    rows = Delivery.objects
    mine = [
        d
        for d in due.select_related("webhook", "notice")[:CALLS]
        if _claim(rows, d, "due", "tries")
    ]
    mine = [
        d
        for d in mine
        if d.notice is None or _take_turn(rows, d, d.lease_name, d.notice.created, "due")
    ]
    answers = asyncio.run(_deliver_all(mine))
    for delivery, (fine, said) in zip(mine, answers, strict=True):
        delivery.webhook.record_response(fine, said)
        row = Delivery.objects.filter(pk=delivery.pk, due__isnull=False)
        if fine:
            row.update(due=None, delivered=timezone.now())
            if delivery.lease_name:
                leases.mark_done(delivery.lease_name)
        else:
            row.update(due=next_attempt(delivery.tries + 1))
    return sum(fine for fine, _ in answers)


async def _deliver_all(deliveries: list[Delivery]) -> list[tuple[bool, str]]:
    return await asyncio.gather(*(deliver(delivery) for delivery in deliveries))


async def deliver(delivery: Delivery) -> tuple[bool, str]:
    """(whether it was answered well, the status or what went wrong)."""
    hook, body = delivery.webhook, json.dumps(delivery.body, separators=(",", ":")).encode()
    try:
        status = await safe_http.post(
            hook.url, body, signature_headers(hook.secret, delivery.message_id, body)
        )
        return 200 <= status < 300, str(status)
    except TimeoutError:
        return False, "no answer in time"
    except (safe_http.UnsafeUrlError, httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return False, str(error) or type(error).__name__


def signature_headers(
    secret: str, name: str, body: bytes, now: float | None = None
) -> dict[str, str]:
    """The headers of a call: what it is, when it was made, and that it is ours (standardwebhooks.com)."""
    at = str(int(time.time() if now is None else now))
    key = base64.b64decode(secret.removeprefix("whsec_"))
    mac = hmac.new(key, f"{name}.{at}.".encode() + body, hashlib.sha256).digest()
    return {
        "Content-Type": "application/json",
        "User-Agent": "Barnraise",
        "webhook-id": name,
        "webhook-timestamp": at,
        "webhook-signature": f"v1,{base64.b64encode(mac).decode()}",
    }


@shared_task(name="notify.delete_old", time_limit=120)
def delete_old() -> int:
    """Forgets what is three months old."""
    return Notification.objects.filter(created__lt=timezone.now() - KEPT).delete()[0]


def _claim(rows: QuerySet, row, due: str, tries: str) -> bool:
    """Whether it is ours to do: for LEASE nobody else finds it due."""
    mine = rows.filter(pk=row.pk, **{due: getattr(row, due)})
    return mine.update(**{due: timezone.now() + LEASE, tries: getattr(row, tries) + 1}) == 1


def _take_turn(rows: QuerySet, row, duty: str, since: datetime, due: str) -> bool:
    """Whether it falls to this mirror, of all that know of it. What another does is looked at again soon; what was done
    is not."""
    turn = leases.acquire(duty, since)
    if turn is LeaseDecision.HELD:
        return True
    tries = "email_tries" if due == "email_due" else "tries"
    over = turn is LeaseDecision.DONE or timezone.now() - since > GIVEN_UP
    again = None if over else timezone.now() + LOOK
    rows.filter(pk=row.pk).update(**{due: again, tries: getattr(row, tries)})
    return False
