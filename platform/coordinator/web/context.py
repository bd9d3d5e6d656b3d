"""Context of every page: the person's unread notifications."""

from typing import Any

from django.http import HttpRequest

MAX_UNREAD = 99


def unread_notifications(request: HttpRequest) -> dict[str, Any]:
    """Return a function that counts unread notifications; templates call it where they show it."""
    person = getattr(request, "user", None)
    if person is None or not person.is_authenticated:
        return {"unread": 0}
    counted: list[int] = []

    def count() -> int:
        if not counted:
            counted.append(
                len(
                    person.notifications.filter(read=None, shown=True).values_list("pk")[
                        :MAX_UNREAD
                    ]
                )
            )
        return counted[0]

    return {"unread": count}
