"""The type of requests that a signed-in person makes."""

from django.http import HttpRequest

from coordinator.accounts.models import User


class AuthenticatedRequest(HttpRequest):
    """A request to a view behind `login_required`.

    It exists for type checks alone: Django never creates one.
    """

    user: User
