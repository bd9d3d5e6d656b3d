"""Context of every page: the current announcements."""

from typing import Any

from django.http import HttpRequest

from coordinator.staff.models import Announcement


def announcements(request: HttpRequest) -> dict[str, Any]:
    """Return a function that lists the announcements; templates call it where they show them."""
    return {"announcements": Announcement.current}
