"""What every page's template is told."""

from django.http import HttpRequest

from coordinator.staff.models import Announcement


def announcements(request: HttpRequest) -> dict:
    """Read only where a page shows them; the admin has the list itself."""
    return {"announcements": Announcement.current}
