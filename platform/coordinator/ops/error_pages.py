"""What the site says when something goes wrong: on API paths always a wire.Problem, elsewhere a page."""

import sys

import redis.exceptions
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string

from barnraise.protocol.coordinator_messages import Problem
from barnraise.protocol.messages import Signed
from coordinator.eventlog.writer import RestorePendingError

VALKEY_GONE = (
    redis.exceptions.ConnectionError,  # also: still loading
    redis.exceptions.TimeoutError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
)


def shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def problem_response(
    status: int, error: str, fields: dict[str, str] | None = None, time: Signed | None = None
) -> HttpResponse:
    """A refusal with a sentence, in the API's one shape."""
    short = {
        shorten(name, 100): shorten(sentence, 100)
        for name, sentence in list((fields or {}).items())[:100]
    }
    body = Problem(error=shorten(error, 1000), fields=short, time=time).model_dump_json()
    response = HttpResponse(body, status=status, content_type="application/json")
    if status == 401:
        response["WWW-Authenticate"] = "Barnraise"
    if status == 503:
        response["Retry-After"] = "5"
    return response


def outage_message(error: BaseException | None) -> str:
    """The sentence for a database or Valkey that is gone, or a log that waits; "" when the error is something else."""
    while error is not None:
        if isinstance(error, RestorePendingError):
            return error.sentence
        if isinstance(error, OperationalError | InterfaceError):
            return "The site's database does not answer just now. Nothing was changed; try again in a moment."
        if isinstance(error, VALKEY_GONE):
            return "The site's live store does not answer just now. Nothing was changed; try again in a moment."
        error = error.__cause__ or error.__context__
    return ""


def error_response(request: HttpRequest, status: int, sentence: str) -> HttpResponse:
    if request.path.startswith("/api/"):
        return problem_response(status, sentence)
    try:
        page = render_to_string(f"{status}.html", {"sentence": sentence})
    except TemplateDoesNotExist:
        return HttpResponse(sentence, status=status, content_type="text/plain; charset=utf-8")
    return HttpResponse(page, status=status)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    return error_response(
        request, 400, "This request makes no sense to the site. Go back and try it another way."
    )


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:
    return error_response(request, 403, str(exception) or "This is not yours to do.")


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    return error_response(request, 404, "There is nothing at this address.")


def nothing(request: HttpRequest, **named: str) -> HttpResponse:
    """For an address that shall not be one."""
    raise Http404


def server_error(request: HttpRequest) -> HttpResponse:
    if sentence := outage_message(sys.exc_info()[1]):
        return error_response(request, 503, sentence)
    return error_response(
        request, 500, "The site made a mistake. It has been noted; try again in a moment."
    )


class ApiShape:
    """Django's own refusals on API paths (a method that is not allowed, a bad host) in the API's one shape."""

    sync_capable = True
    async_capable = False

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        plain = not response.headers.get("Content-Type", "").startswith("application/json")
        if request.path.startswith("/api/") and response.status_code >= 400 and plain:
            allowed = response.headers.get("Allow")
            shaped = problem_response(
                response.status_code, f"use {allowed} here" if allowed else response.reason_phrase
            )
            if allowed:
                shaped["Allow"] = allowed
            return shaped
        return response
