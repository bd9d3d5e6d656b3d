"""Answer with an error: on API paths always a `messages.Problem`, elsewhere a page."""

import sys

import redis.exceptions
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string

from barnraise.protocol.coordinator_messages import Problem
from barnraise.protocol.messages import Signed
from coordinator.lib.exceptions import RestorePendingError
from coordinator.lib.middleware import GetResponse, sync_middleware

API_PATH = "/api/"
VALKEY_ERRORS = (
    redis.exceptions.ConnectionError,  # also raised while Valkey is loading
    redis.exceptions.TimeoutError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
)
# Codes in other errors of Valkey: its disk is full; and those above, within a pipeline.
VALKEY_OUTAGE_CODES = ("MISCONF", "OOM", "READONLY", "LOADING")
MAX_ERROR_CHARS = 1000
MAX_FIELDS = 100
MAX_FIELD_CHARS = 100


def shorten(text: str, length: int) -> str:
    """Return at most `length` characters, ending in "…" if some were cut off."""
    return text if len(text) <= length else text[: length - 1] + "…"


def problem_response(
    status: int, error: str, fields: dict[str, str] | None = None, time: Signed | None = None
) -> HttpResponse:
    """Build the API's one form of error, with this site's signed time for a wrong clock."""
    short_fields = {
        shorten(name, MAX_FIELD_CHARS): shorten(sentence, MAX_FIELD_CHARS)
        for name, sentence in list((fields or {}).items())[:MAX_FIELDS]
    }
    problem = Problem(error=shorten(error, MAX_ERROR_CHARS), fields=short_fields, time=time)
    response = HttpResponse(
        problem.model_dump_json(), status=status, content_type="application/json"
    )
    if status == 401:
        response["WWW-Authenticate"] = "Barnraise"
    if status == 503:
        response["Retry-After"] = "5"
    return response


def outage_message(error: BaseException | None) -> str:
    """Return the sentence for an outage of Postgres or Valkey, or a pending restore; otherwise "".

    The causes of an exception are examined as well.
    """
    while error is not None:
        if isinstance(error, RestorePendingError):
            return error.sentence
        if isinstance(error, OperationalError | InterfaceError):
            return (
                "The site's database does not answer just now. Nothing was changed; try again in a "
                "moment."
            )
        if _is_valkey_outage(error):
            return (
                "The site's live store does not answer just now. Nothing was changed; try again in "
                "a moment."
            )
        error = error.__cause__ or error.__context__
    return ""


def _is_valkey_outage(error: BaseException) -> bool:
    if isinstance(error, VALKEY_ERRORS):
        return True
    words = str(error).split() if isinstance(error, redis.exceptions.ResponseError) else []
    return any(code in words for code in VALKEY_OUTAGE_CODES)


def error_response(request: HttpRequest, status: int, sentence: str) -> HttpResponse:
    """Build an error for this request's path: a problem, a page, or text if the page is missing."""
    if request.path.startswith(API_PATH):
        return problem_response(status, sentence)
    try:
        page = render_to_string(f"{status}.html", {"sentence": sentence})
    except TemplateDoesNotExist:
        return HttpResponse(sentence, status=status, content_type="text/plain; charset=utf-8")
    return HttpResponse(page, status=status)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer a malformed request."""
    return error_response(
        request, 400, "The site does not understand this request. Go back and try it another way."
    )


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer a request that the person may not make."""
    return error_response(
        request, 403, str(exception) or "You do not have the permission to do this."
    )


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer a request for an unknown address."""
    return error_response(request, 404, "There is nothing at this address.")


def always_not_found(request: HttpRequest, **captured: str) -> HttpResponse:
    """Answer 404 at an address that Django would serve otherwise."""
    raise Http404


def server_error(request: HttpRequest) -> HttpResponse:
    """Answer a request that failed: 503 during an outage, else 500."""
    if sentence := outage_message(sys.exc_info()[1]):
        return error_response(request, 503, sentence)
    return error_response(
        request, 500, "The site made an error. It was logged; try again in a moment."
    )


@sync_middleware
def convert_api_error(request: HttpRequest, get_response: GetResponse) -> HttpResponse:
    """Give Django's own errors on API paths (a wrong method or host) the API's one form."""
    response = get_response(request)
    is_json = response.headers.get("Content-Type", "").startswith("application/json")
    if not request.path.startswith(API_PATH) or response.status_code < 400 or is_json:
        return response
    allowed = response.headers.get("Allow")
    sentence = f"use {allowed} here" if allowed else response.reason_phrase
    problem = problem_response(response.status_code, sentence)
    if allowed:
        problem["Allow"] = allowed
    return problem
