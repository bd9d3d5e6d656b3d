"""Context of every page: the person's unread notifications, and whether figures are delayed."""

from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.http import HttpRequest

from coordinator.lib import heartbeats

CONSOLE_BACKEND = "django.core.mail.backends.console.EmailBackend"
MAX_UNREAD = 99  # the count that pages show stops there


def unread_notifications(request: HttpRequest) -> dict[str, Any]:
    """Return a function that counts unread notifications; templates call it where they show it."""
    person = getattr(request, "user", None)
    if person is None or not person.is_authenticated:
        return {"unread": 0}

    @lru_cache(maxsize=1)
    def count_unread() -> int:
        unread = person.notifications.filter(read=None, shown=True)
        return len(unread.values_list("pk")[:MAX_UNREAD])

    return {"unread": count_unread}


def site_facts(request: HttpRequest) -> dict[str, Any]:
    """Return the links of the foot, and whether emails reach nobody."""
    return {
        "legal_links": settings.LEGAL_LINKS,
        "source_url": settings.SOURCE_URL,
        "emails_are_logged": settings.EMAIL_BACKEND == CONSOLE_BACKEND,
    }


def delayed_figures(request: HttpRequest) -> dict[str, Any]:
    """Return a function for since when figures are delayed; templates call it where they say so."""

    def delayed_since() -> datetime | None:
        since = heartbeats.delayed_since()
        return datetime.fromtimestamp(since, UTC) if since else None

    return {"delayed_since": delayed_since}
