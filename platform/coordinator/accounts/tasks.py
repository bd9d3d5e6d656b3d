"""Send e-mail, and delete expired sessions."""

from smtplib import SMTPException, SMTPRecipientsRefused

from celery import shared_task
from django.conf import settings
from django.contrib.sessions.backends.db import SessionStore
from django.core.mail import EmailMessage


@shared_task(
    name="accounts.send_email",
    autoretry_for=(OSError, SMTPException),  # a mail server that is gone or busy
    dont_autoretry_for=(SMTPRecipientsRefused,),
    retry_backoff=10,  # seconds, doubling
    retry_backoff_max=3600,
    max_retries=12,
    time_limit=60,
)
def send_email(subject: str, body: str, to: str, headers: dict[str, str] | None = None) -> None:
    """Send one e-mail to one address, with retries for about half a day.

    Twice in the mailbox is better than never.
    """
    EmailMessage(
        " ".join(subject.split()), body, settings.DEFAULT_FROM_EMAIL, [to], headers=headers or {}
    ).send()


@shared_task(name="accounts.clear_expired_sessions", time_limit=120)
def clear_expired_sessions() -> None:
    """Delete expired sessions; one of an unfinished log-in holds an address too."""
    SessionStore.clear_expired()
