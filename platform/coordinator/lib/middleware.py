"""Build Django's middleware from functions."""

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

GetResponse = Callable[[HttpRequest], HttpResponse]


def sync_middleware(
    process: Callable[[HttpRequest, GetResponse], HttpResponse],
) -> Callable[[GetResponse], GetResponse]:
    """Return a middleware, which without any flags is a synchronous one for Django.

    Args:
        process: Serves a request, usually by the second argument, which is what comes after it.
    """
    return lambda get_response: lambda request: process(request, get_response)
