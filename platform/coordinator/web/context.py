"""What every page's template is told of the person."""

from django.http import HttpRequest

MOST = 99


def unread_notifications(request: HttpRequest) -> dict:
    """How many notices are new, asked only where a page shows it."""
    person = getattr(request, "user", None)
    if person is None or not person.is_authenticated:
        return {"unread": 0}
    found: list[int] = []

    def count() -> int:
        if not found:
            found.append(
                len(person.notifications.filter(read=None, shown=True).values_list("pk")[:MOST])
            )
        return found[0]

    return {"unread": count}
