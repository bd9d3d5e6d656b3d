"""Turn every error into a `Problem`: one sentence, and one for each field that it concerns."""

from collections.abc import Callable
from typing import Any

import redis.exceptions
from django.core.exceptions import RequestDataTooBig
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from ninja import NinjaAPI, Router
from ninja.errors import HttpError, ValidationError

from barnraise.errors import SpecError
from barnraise.protocol.coordinator_messages import Problem
from coordinator.api.authentication import ApiError
from coordinator.lib import site_identity
from coordinator.ops.error_pages import outage_message, problem_response

ERROR_STATUSES = frozenset({400, 401, 403, 404, 409, 413, 422, 429, 503})
OUTAGES = (OperationalError, InterfaceError, redis.exceptions.RedisError)


class EndpointRouter(Router):
    """A router whose endpoints respond with what their functions return, or with a `Problem`."""

    def add_api_operation(
        self, path: str, methods: list[str], view_func: Callable[..., Any], **options: Any
    ) -> None:
        """Declare the responses, for Ninja and the documentation."""
        options["response"] = {200: view_func.__annotations__["return"], ERROR_STATUSES: Problem}
        super().add_api_operation(path, methods, view_func, **options)


def install_error_handlers(api: NinjaAPI) -> None:
    """Answer the exceptions that endpoints may raise."""
    handlers: dict[type[Exception], Any] = {
        ApiError: _api_error,
        ValidationError: _validation_error,
        SpecError: _spec_error,
        HttpError: _http_error,
        Http404: lambda request, error: problem_response(404, "there is nothing at this address"),
        RequestDataTooBig: lambda request, error: problem_response(
            413, "send less than 1 MB at once"
        ),
        **dict.fromkeys(OUTAGES, _outage_response),
    }
    for exception, handler in handlers.items():
        api.add_exception_handler(exception, handler)


def _api_error(request: HttpRequest, error: ApiError) -> HttpResponse:
    # The signed time lets a machine with a wrong clock correct its next signature.
    signed_time = site_identity.signed_time() if error.status == 401 else None
    return problem_response(error.status, error.sentence, error.fields, signed_time)


def _validation_error(request: HttpRequest, error: ValidationError) -> HttpResponse:
    """Name each field by its dotted path in the body, as its sender knows it."""
    fields: dict[str, str] = {}
    for problem in error.errors:
        # A place is (source, parameter, field…); the body has one parameter, which has no name.
        place = problem["loc"][2:] if problem["loc"][0] == "body" else problem["loc"][1:]
        fields.setdefault(".".join(str(part) for part in place) or "body", problem["msg"])
    name, sentence = next(iter(fields.items()), ("body", "is malformed"))
    return problem_response(422, f"{name}: {sentence}", fields)


def _spec_error(request: HttpRequest, error: SpecError) -> HttpResponse:
    return problem_response(422, str(error), error.problems)


def _outage_response(request: HttpRequest, error: Exception) -> HttpResponse:
    if sentence := outage_message(error):
        return problem_response(503, sentence)
    raise error  # not an outage: an error in the query


def _http_error(request: HttpRequest, error: HttpError) -> HttpResponse:
    sentence = "the body is not JSON" if error.status_code == 400 else str(error)
    return problem_response(error.status_code, sentence)
